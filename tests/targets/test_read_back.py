"""Weights read back out of every target's files equal the neutral weights, bit for bit."""

from __future__ import annotations

import family_models as models
import pytest
from engines import make_model, row

from edgekit.plugins import load_target
from edgekit.testing import check_weights

ROWS = [("onnx", family, "s4-g32") for family in models.EVERY]
ROWS += [("onnx", "llama", "s8"), ("onnx", "llama", "float32"), ("onnx", "gemma3", "float16"), ("onnx", "phi3", "s8")]
MLX = [
    ("llama", "s4-g32"), ("llama untied, with biases", "s4-g64"), ("qwen3", "s8"), ("phi3", "float16"),
    ("gemma3", "s4-g128"), ("lfm2, five taps, with biases", "s4-g64"), ("qwen3_5", "s8"), ("gpt_oss", "s4-g32"),
    ("lfm2_moe", "s8"), ("lfm2_moe", "s4-g32"), ("mixtral", "float32"),
]  # fmt: skip
EXECUTORCH = [
    ("llama untied, with biases", "s8", {"layers": 1}),
    ("phi3", "s4-g32", {"layers": 1}),  # one matrix for queries, keys and values, one for gate and up
    ("gemma3", "float32", {}),  # norms of heads and after blocks, each with an offset
    ("gemma2", "float32", {}),
    ("qwen2", "s4-g32", {"exits": (1,)}),
]


@pytest.mark.parametrize(
    ("target", "family", "recipe", "options"),
    [row(*each, {}) for each in ROWS]
    + [row("mlx", *each, {"backend": backend}) for each in MLX for backend in ("cpu", "metal")]
    + [row("executorch", *each) for each in EXECUTORCH],
)
def test_weights_equal_neutral_weights(target: str, family: str, recipe: str, options: dict[str, object]) -> None:
    made = make_model(target, family, recipe, **options)
    check_weights(load_target(target), made.plan, made.files, made.weights)
