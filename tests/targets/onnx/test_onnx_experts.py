"""Mixtures of experts on onnxruntime: every format, exact mode, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import family_models as models
from edgekit_onnx import OnnxTarget
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import EXACT, FAST, export

from edgekit.contracts.engine import Chunk
from edgekit.contracts.recipe import Format, Recipe, Rule, named_recipe
from edgekit.errors import DamagedArtifact, Unsupported
from edgekit.testing import check_engine, check_weights

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]

TOKENS = [int(token) for token in models.tokens_of(48, seed=5)]
NARROW = {"moe_intermediate_size": 96}  # s4-g64 fits 64 values of a row of gate, and 32 of one of down


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test its own facts of the machine."""
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))


class Made:
    """The exported files of a tiny mixture, which tests open."""

    def __init__(self, folder: Path, family: str, recipe: str | Recipe, level: int, **changes: Any) -> None:
        kind, config = models.EVERY[family]
        models.write_model(folder / "model", kind, {**config, **changes})
        self.weights = models.weights_of(folder / "model", recipe, folder / "store")
        exits = (1,) if family in models.EXPERTS else ()
        self.plan = models.plan_for(self.weights.model, self.weights.recipe, chunk_tokens=16, exits=exits)
        self.folder, self.files = folder, folder / "out"
        self.files.mkdir()
        export(self.plan, self.weights, self.files, models.quiet, accuracy_level=level)

    def open(self, *, exact: bool = False) -> OnnxEngine:
        return OnnxEngine(self.plan, self.files, exact=exact)

    def apart(self, *, packs: bool = True) -> float:
        """The largest difference of logits to transformers, over the largest logit: a chunk, then token by token."""
        engine = OnnxEngine(self.plan, self.files, packs=packs)
        state = engine.start(self.plan.storage)
        pieces = [TOKENS[:16], TOKENS[16:25], *([token] for token in TOKENS[25:])]
        found = np.concatenate([engine.forward([Chunk(state, piece, len(piece))])[0] for piece in pieces])
        engine.close()
        expected = models.logits_of(models.reference_of(self.folder / "model", self.weights), TOKENS)
        return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("family", models.EXPERTS)
@pytest.mark.parametrize("recipe", ["float32", "float16"])
def test_float_experts_equal_transformers(tmp_path: Path, family: str, recipe: str) -> None:
    assert Made(tmp_path, family, recipe, FAST).apart() < 1e-5


@pytest.mark.parametrize(("recipe", "packs"), [("s4-g32", True), ("s4-g64", True), ("s4-g128", False), ("s8", False)])
def test_integers_of_experts_are_those_of_the_neutral_weights(tmp_path: Path, recipe: str, packs: bool) -> None:
    """For packed weights of eight bits, the operator has only a kernel that rounds activations."""
    made = Made(tmp_path, "qwen3_moe", recipe, EXACT, **NARROW)
    assert made.apart(packs=packs) < 1e-5
    check_weights(OnnxTarget(), made.plan, made.files, made.weights)


@pytest.mark.slow
@pytest.mark.parametrize("family", models.EXPERTS)
@pytest.mark.parametrize("recipe", ["s4-g32", "s8", "float32"])
def test_exact_mode_is_bitwise(tmp_path: Path, family: str, recipe: str) -> None:
    made = Made(tmp_path, family, recipe, FAST)
    check_engine(lambda: made.open(exact=True), exact=True, tolerance=0, sequences=20)


@pytest.mark.parametrize("family", ["qwen3_moe", "lfm2_moe"])
def test_default_mode_equals_up_to_rounding(tmp_path: Path, family: str) -> None:
    made = Made(tmp_path, family, "s4-g32", EXACT)
    check_engine(made.open, exact=False, tolerance=1e-4, sequences=40)


def test_experts_in_recurrent_layers_refuse_floats_and_exact_mode(tmp_path: Path) -> None:
    made = Made(tmp_path, "lfm2_moe", "s4-g32", FAST)
    with pytest.raises(Unsupported, match="exact mode feeds one token a call"):
        made.open(exact=True)
    floats = made.plan.model_copy(update={"recipe": named_recipe("float32")})
    with pytest.raises(Unsupported, match="the experts of lfm2_moe in floats are not supported"):
        export(floats, made.weights, tmp_path, models.quiet)


def test_experts_that_the_operator_cannot_hold_are_refused(tmp_path: Path) -> None:
    eight, four = Format(kind="s8"), Format(kind="s4", group=32)
    mixed = Recipe(name="mixed", rules=(Rule(pattern="*.experts.3.*", format=eight), Rule(pattern="*", format=four)))
    made = Made(tmp_path, "mixtral", "s4-g32", FAST)
    for plan, reason in (
        (made.plan.model_copy(update={"recipe": mixed}), "experts in s4 and s8 at once"),
        (made.plan.model_copy(update={"backend": "cuda", "exits": ()}), "supported on the CPU alone"),
        (
            made.plan.model_copy(update={"model": made.plan.model.model_copy(update={"activation": "gelu"})}),
            "experts with the activation gelu",
        ),
    ):
        if plan.backend == "cuda":
            plan = plan.model_copy(update={"storage": plan.storage.model_copy(update={"kv_bits": 16})})
        with pytest.raises(Unsupported, match=reason):
            export(plan, made.weights, tmp_path, models.quiet)


def without_sinks(node: Any) -> bool:
    if node.op_type == "GroupQueryAttention":
        node.input[11] = ""
    return node.op_type == "GroupQueryAttention"


def sinks_of_other_sizes(node: Any) -> bool:
    if node.op_type == "GroupQueryAttention":
        node.input[11] = node.input[7]  # a rotary table
    return node.op_type == "GroupQueryAttention"


def without_bias(node: Any) -> bool:
    if node.op_type == "QMoE":
        node.input[4] = ""
    return node.op_type == "QMoE"


def bias_of_other_sizes(node: Any) -> bool:
    if node.op_type == "QMoE":
        node.input[7] = node.input[4]
    return node.op_type == "QMoE"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without_sinks, "has sinks"),
        (sinks_of_other_sizes, "has sinks"),
        (without_bias, "do not fit their weights"),
        (bias_of_other_sizes, "do not fit their weights"),
    ],
)
def test_a_graph_with_other_sinks_or_biases_is_refused(
    tmp_path: Path, change: Callable[[Any], bool], named: str
) -> None:
    made = Made(tmp_path, "gpt_oss", "s4-g32", FAST)
    path = next(path for path in made.files.glob("*.onnx") if b"QMoE" in path.read_bytes())
    model = onnx.load_model(path, load_external_data=False)
    assert any(change(node) for node in model.graph.node)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(DamagedArtifact, match=named):
        made.open()


@pytest.mark.parametrize(("attribute", "value"), [("k", 3), ("expert_weight_bits", 8), ("block_size", 64)])
def test_a_graph_with_other_experts_is_refused(tmp_path: Path, attribute: str, value: int) -> None:
    made = Made(tmp_path, "mixtral", "s4-g32", FAST)
    path = next(path for path in made.files.glob("*.onnx") if b"QMoE" in path.read_bytes())
    model = onnx.load_model(path, load_external_data=False)
    (node, *_) = [node for node in model.graph.node if node.op_type == "QMoE"]
    next(each for each in node.attribute if each.name == attribute).i = value
    path.write_bytes(model.SerializeToString())
    with pytest.raises(DamagedArtifact, match="experts"):
        made.open()
