"""Linears of one layer in several formats: every target packs the same integers and answers as the reference does."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

pytest.importorskip("torch")

import tiny_models
import torch

from edgekit.artifact.export import ExportOptions, export
from edgekit.common.content_store import ContentStore
from edgekit.contracts.recipe import RECIPES, Format, Recipe, Rule
from edgekit.model.tensors import Tensor
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.plugins import load_target
from edgekit.quant.pipeline import neutral_weights

pytestmark = pytest.mark.quantize

NEEDS = {"onnx": "onnxruntime", "mlx": "mlx.core", "executorch": "executorch"}
S8 = Format(kind="s8")
SPLIT = Recipe(
    name="split",
    rules=(
        Rule(pattern="*.0.self_attn.v_proj", format=S8),
        Rule(pattern="*.1.self_attn.q_proj", format=S8),
        Rule(pattern="*.mlp.up_proj", format=S8),
        *RECIPES["s4-g32"].rules,
    ),
)


@pytest.mark.parametrize("target", NEEDS)
def test_every_target_packs_the_integers_of_mixed_layers(tmp_path: Path, target: str) -> None:
    pytest.importorskip(NEEDS[target])
    model = tiny_models.write_tiny(tmp_path / "model")
    store, options = ContentStore(tmp_path / "store"), ExportOptions(store=tmp_path / "store")
    wish = PlanRequest(recipe=SPLIT, target=target, context=64)
    artifact = export(make_plans(str(model), ["this-cpu"], wish)[0], tmp_path / "out", options)
    weights = neutral_weights(model, SPLIT, store=store)
    assert artifact.manifest.weights_sha256 == weights.sha256
    assert "quantised matrices read back bit for bit" in artifact.manifest.self_check
    read = dict(load_target(target).weights(artifact.plan, artifact.folder))
    linears = [tensor for tensor in weights.model.tensors() if tensor.role == "linear"]
    assert {str(weights.format_of(tensor.module)) for tensor in linears} == {"s8", "s4-g32"}
    for tensor in linears:
        assert torch.equal(torch.as_tensor(read[tensor.name]), torch.from_numpy(weights.tensor(tensor.name)))


def test_the_first_rule_that_matches_wins() -> None:
    """Rules with and without wildcards in any order, beside matching one after the other."""
    s4, other = Format(kind="s4", group=32), Format(kind="float16")
    patterns = ["layers.1.up", "*.up", "layers.1.up", "layers.[12].gate", "layers.2.gate", "layer?.3.up", "*"]
    formats = [S8, s4, other, s4, S8, other, S8]
    names = ["layers.1.up", "layers.2.up", "layers.1.gate", "layers.2.gate", "layers.3.gate", "layers.3.up"]
    for start in range(len(patterns)):
        rules = tuple(
            Rule(pattern=pattern, format=form) for pattern, form in zip(patterns[start:], formats[start:], strict=True)
        )
        recipe = Recipe(name="rules", rules=rules)
        for name in names:
            first = next(rule.format for rule in rules if fnmatchcase(name, rule.pattern))
            assert recipe.format_of(Tensor(f"{name}.weight", (64, 64), "linear")) == first, (start, name)
    assert Recipe(name="one", rules=rules[:0]).format_of(Tensor("a.weight", (64, 64), "linear")) == other
