"""Mixtures of experts on onnxruntime: every format, exact mode, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import family_models as models
from edgekit_onnx import OnnxTarget
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import EXACT, FAST
from engines import Model, apart, fed, onnx_model

from edgekit.contracts.recipe import Format, Recipe, Rule, named_recipe
from edgekit.errors import DamagedArtifact, Unsupported
from edgekit.testing import check_weights

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]

TOKENS = [int(token) for token in models.tokens_of(48, seed=5)]
NARROW = {"moe_intermediate_size": 96}  # s4-g64 fits 64 values of a row of gate, and 32 of one of down


def mixture(family: str, recipe: str = "s4-g32", level: int = FAST, **changes: Any) -> Model:
    return onnx_model(family, recipe, level, exits=(1,) if family in models.EXPERTS else (), **changes)


def error_of(made: Model, *, packs: bool = True) -> float:
    """The largest difference of logits to transformers, over the largest logit: a chunk, then token by token."""
    engine = OnnxEngine(made.plan, made.files, packs=packs)
    found = fed(engine, engine.start(made.plan.storage), TOKENS, [16, 9, *[1] * len(TOKENS)])
    engine.close()
    return apart(found, made.logits(TOKENS))


@pytest.mark.parametrize("family", models.EXPERTS)
@pytest.mark.parametrize("recipe", ["float32", "float16"])
def test_float_experts_equal_transformers(family: str, recipe: str) -> None:
    assert error_of(mixture(family, recipe)) < 1e-5


@pytest.mark.parametrize(("recipe", "packs"), [("s4-g32", True), ("s4-g64", True), ("s4-g128", False), ("s8", False)])
def test_integers_of_experts_are_those_of_the_neutral_weights(recipe: str, packs: bool) -> None:
    """For packed weights of eight bits, the operator has only a kernel that rounds activations."""
    made = mixture("qwen3_moe", recipe, EXACT, config=NARROW)
    assert error_of(made, packs=packs) < 1e-5
    check_weights(OnnxTarget(), made.plan, made.files, made.weights)


def test_experts_in_recurrent_layers_refuse_floats_and_exact_mode() -> None:
    made = mixture("lfm2_moe")
    with pytest.raises(Unsupported, match="exact mode feeds one token a call"):
        made.open(exact=True)
    floats = made.plan.model_copy(update={"recipe": named_recipe("float32")})
    with pytest.raises(Unsupported, match="the experts of lfm2_moe in floats are not supported"):
        OnnxTarget().check(floats)


def test_experts_that_the_operator_cannot_hold_are_refused() -> None:
    eight, four = Format(kind="s8"), Format(kind="s4", group=32)
    mixed = Recipe(name="mixed", rules=(Rule(pattern="*.experts.3.*", format=eight), Rule(pattern="*", format=four)))
    made = mixture("mixtral")
    for plan, reason in (
        (made.plan.model_copy(update={"recipe": mixed}), "experts in s4 and s8 at once"),
        (
            made.plan.model_copy(update={"model": made.plan.model.model_copy(update={"activation": "gelu"})}),
            "experts with the activation gelu",
        ),
    ):
        with pytest.raises(Unsupported, match=reason):
            OnnxTarget().check(plan)


CHANGED = {
    "no sinks": ("gpt_oss", "GroupQueryAttention", lambda node: put(node, 11, ""), "has sinks"),
    "sinks of other sizes": ("gpt_oss", "GroupQueryAttention", lambda node: put(node, 11, node.input[7]), "has sinks"),
    "no bias": ("gpt_oss", "QMoE", lambda node: put(node, 4, ""), "do not fit their weights"),
    "a bias of other sizes": ("gpt_oss", "QMoE", lambda node: put(node, 7, node.input[4]), "do not fit their weights"),
    "fewer active": ("mixtral", "QMoE", lambda node: set_number(node, "k", 3), "experts"),
    "other bits": ("mixtral", "QMoE", lambda node: set_number(node, "expert_weight_bits", 8), "experts"),
    "other blocks": ("mixtral", "QMoE", lambda node: set_number(node, "block_size", 64), "experts"),
}


def put(node: Any, place: int, name: str) -> None:
    node.input[place] = name


def set_number(node: Any, name: str, value: int) -> None:
    next(each for each in node.attribute if each.name == name).i = value


@pytest.mark.parametrize(("family", "kind", "change", "named"), CHANGED.values(), ids=CHANGED)
def test_a_graph_with_other_experts_sinks_or_biases_is_refused(
    tmp_path: Path, family: str, kind: str, change: Callable[[Any], None], named: str
) -> None:
    made = mixture(family).copied(tmp_path)
    path = next(path for path in made.files.glob("*.onnx") if b"QMoE" in path.read_bytes())
    model = onnx.load_model(path, load_external_data=False)
    changed = [node for node in model.graph.node if node.op_type == kind]
    assert changed
    for node in changed:
        change(node)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(DamagedArtifact, match=named):
        made.open()
