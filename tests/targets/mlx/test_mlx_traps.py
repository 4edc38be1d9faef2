"""Cases in which mlx-lm's caches diverge silently; the suite of engines has the same ones of this engine.

These tests state what its version does today. Where one fails after an upgrade, mlx-lm has been mended there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("mlx_lm")

import family_models as models
import mlx.core as mx
from engines import apart, mlx_model
from mlx_lm.models import cache
from mlx_lm.utils import load_model

pytestmark = [pytest.mark.mlx, pytest.mark.quantize]

WINDOW, SINKS = 32, 4
TEXT = models.tokens_of(100)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(mlx_model("llama 3 rope, wide heads").files)[0]


def said(model: Any, caches: list[Any], size: int) -> np.ndarray[Any, Any]:
    """The logits of every token, fed in pieces."""
    pieces = [TEXT[place : place + size] for place in range(0, len(TEXT), size)]
    return np.concatenate([np.array(model(mx.array([piece]), cache=caches)[0]) for piece in pieces])


def rotating(model: Any, keep: int = SINKS) -> list[Any]:
    return [cache.RotatingKVCache(max_size=WINDOW, keep=keep) for _ in model.layers]


def test_a_full_rotating_cache_loses_sinks_and_cannot_be_rewound(model: Any) -> None:
    caches = rotating(model)
    single = said(model, caches, 1)
    assert apart(said(model, rotating(model), 5)[WINDOW:], single[WINDOW:]) > 0.05
    assert cache.trim_prompt_cache(caches, 3) == 0  # and no error: the rejected drafts stay


def test_rotating_caches_are_batched_without_sinks(model: Any) -> None:
    merged = [cache.BatchRotatingKVCache.merge([one, one]) for one in rotating(model)]
    batched = np.concatenate([np.array(model(mx.array([[token], [token]]), cache=merged)[0]) for token in TEXT])
    assert apart(batched, said(model, rotating(model, keep=0), 1)) < 1e-4
    assert apart(batched[WINDOW:], said(model, rotating(model), 1)[WINDOW:]) > 0.05


def test_sizes_are_ignored_and_quantised_caches_neither_rotate_nor_batch(model: Any) -> None:
    assert all(isinstance(each, cache.KVCache) for each in cache.make_prompt_cache(model, max_kv_size=WINDOW))
    with pytest.raises(NotImplementedError):
        rotating(model)[0].to_quantized(group_size=32, bits=8)
    assert not hasattr(cache.QuantizedKVCache(group_size=32, bits=8), "merge")


@pytest.mark.parametrize("family", ["mistral with a window", "qwen2 with windows", "gemma2"])
def test_declared_windows_are_ignored(family: str) -> None:
    made, tokens = mlx_model(family), models.tokens_of(60)
    assert apart(np.array(load_model(made.files)[0](mx.array([tokens]))[0]), made.logits(tokens)) > 0.1
