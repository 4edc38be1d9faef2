"""Random weights take the shapes of any model that is read."""

from __future__ import annotations

from pathlib import Path

from edgekit.contracts.recipe import named_recipe
from edgekit.quant.random_weights import random_weights
from tests.helpers.configs import TINY


def test_linears_with_biases_are_written_too(tmp_path: Path) -> None:
    weights = random_weights(tmp_path / "weights", TINY["qwen2"], named_recipe("s8"), "random")
    module = "model.layers.0.self_attn.q_proj"
    outputs = weights.tensor_of(module).shape[0]
    assert weights.scales(module).shape == (outputs, 1)
    assert weights.floats(f"{module}.bias").shape == (outputs,)
