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
    assert not weights.floats(f"{module}.bias").any() and weights.floats(f"{module}.bias").shape == (outputs,)


def test_integers_have_no_common_direction(tmp_path: Path) -> None:
    """All outputs would else grow alike, and attention would fall below the smallest normal float."""
    weights = random_weights(tmp_path / "weights", TINY["llama"], named_recipe("s4-g32"), "random")
    matrix = next(each for each in weights.modules() if weights.format_of(each).kind == "s4")
    integers = weights.integers(matrix)
    assert integers.min() == -7 and integers.max() == 7
    spread = integers.std() / integers.size**0.5
    assert abs(integers.mean()) < 4 * spread
