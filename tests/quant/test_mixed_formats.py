"""Linears of one layer in several formats: every target packs the same integers and answers as the reference does."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import tiny_models
import torch

from edgekit.artifact.export import export
from edgekit.common.content_store import ContentStore
from edgekit.contracts.recipe import RECIPES, Format, Recipe, Rule
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
    store = ContentStore(tmp_path / "store")
    wish = PlanRequest(recipe=SPLIT, target=target, context=64)
    artifact = export(make_plans(str(model), ["this-cpu"], wish)[0], tmp_path / "out", store=store)
    weights = neutral_weights(model, SPLIT, store=store)
    assert artifact.manifest.weights_sha256 == weights.sha256
    assert "quantised matrices read back bit for bit" in artifact.manifest.self_check
    read = dict(load_target(target).weights(artifact.plan, artifact.folder))
    linears = [tensor for tensor in weights.model.tensors() if tensor.role == "linear"]
    assert {str(weights.format_of(tensor.module)) for tensor in linears} == {"s8", "s4-g32"}
    for tensor in linears:
        assert torch.equal(torch.as_tensor(read[tensor.name]), torch.from_numpy(weights.tensor(tensor.name)))
