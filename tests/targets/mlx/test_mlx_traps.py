"""Cases in which mlx-lm's caches diverge silently and this engine does not; each pair of tests shows both.

The tests of mlx-lm state what its version does today. Where one fails after an upgrade, mlx-lm has been mended there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("mlx_lm")

import mlx.core as mx
import mlx_models
from edgekit_mlx.engine import MlxEngine
from mlx_lm.models.cache import (
    BatchRotatingKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.utils import load_model

from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.errors import ContextExceeded

pytestmark = [pytest.mark.mlx, pytest.mark.quantize]

FAMILY = "llama 3 rope, wide heads"
WINDOW, SINKS = 32, 4
POLICY = KVEvictionPolicy(window=WINDOW, sinks=SINKS, block=4)
TEXT = mlx_models.tokens_of(100)


def theirs() -> Any:
    model, _ = load_model(mlx_models.made(FAMILY).files)
    return model


def ours() -> MlxEngine:
    made = mlx_models.made(FAMILY)
    return MlxEngine(made.plan, made.files)


def said(model: Any, caches: list[Any], tokens: list[int], size: int) -> np.ndarray[Any, Any]:
    """mlx-lm's logits of every token, fed in pieces."""
    pieces = [tokens[place : place + size] for place in range(0, len(tokens), size)]
    return np.concatenate([np.array(model(mx.array([piece]), cache=caches)[0]) for piece in pieces])


def rotating(model: Any, keep: int = SINKS) -> list[Any]:
    return [RotatingKVCache(max_size=WINDOW, keep=keep) for _ in model.layers]


def under_policy(engine: MlxEngine, size: int, bits: int = 32, text: list[int] | None = None) -> np.ndarray[Any, Any]:
    state = engine.start(mlx_models.storage(engine, bits, WINDOW))
    found = mlx_models.fed_under(engine, state, text or TEXT, POLICY, size)
    state.close()
    return found


def test_mlx_lm_ignores_requested_cache_size() -> None:
    caches = make_prompt_cache(theirs(), max_kv_size=WINDOW)
    assert all(isinstance(cache, KVCache) for cache in caches)


def test_state_never_exceeds_its_capacity() -> None:
    engine = ours()
    state = engine.start(mlx_models.storage(engine, 32, WINDOW))
    before = state.bytes
    mlx_models.fed_under(engine, state, TEXT, POLICY, 5)
    assert state.length <= WINDOW
    assert state.bytes - before <= SINKS * 4 * 32 * 2 * 3  # the first keys of its sinks, in float32
    if state.held.remaining_capacity:
        engine.forward([Chunk(state, [1] * state.held.remaining_capacity, 0)])
    with pytest.raises(ContextExceeded):
        engine.forward([Chunk(state, [1], 1)])
    engine.close()


def test_mlx_lm_loses_sinks_in_full_rotating_cache() -> None:
    model = theirs()
    single, chunked = said(model, rotating(model), TEXT, 1), said(model, rotating(model), TEXT, 5)
    assert mlx_models.apart(chunked[WINDOW:], single[WINDOW:]) > 0.05


@pytest.mark.parametrize("size", [2, 5, 16])
def test_sinks_do_not_depend_on_chunking(size: int) -> None:
    engine = ours()
    np.testing.assert_array_equal(under_policy(engine, size), under_policy(engine, 1))
    engine.close()


def test_mlx_lm_cannot_rewind_wrapped_rotating_cache() -> None:
    model = theirs()
    caches = rotating(model)
    said(model, caches, TEXT, 1)
    assert trim_prompt_cache(caches, 3) == 0  # and no error: the rejected drafts stay


def test_drafts_rewind_after_any_eviction() -> None:
    engine = ours()
    plain = under_policy(engine, 1)
    state = engine.start(mlx_models.storage(engine, 32, WINDOW))
    found, drafts = [], [5, 6, 7]
    for token in TEXT:
        gone = POLICY.eviction(state.length)
        if gone:
            state.evict(*gone)
        room = POLICY.remaining_capacity(state.length)
        tried = drafts[: (room or 1) - 1]
        found.append(engine.forward([Chunk(state, [token, *tried], len(tried) + 1)])[0][:1])
        state.rewind(len(tried))
    engine.close()
    np.testing.assert_array_equal(np.concatenate(found), plain)


def test_mlx_lm_batches_rotating_caches_without_sinks() -> None:
    model = theirs()
    merged = [BatchRotatingKVCache.merge([one, one]) for one in rotating(model, keep=SINKS)]
    batched = np.concatenate([np.array(model(mx.array([[token], [token]]), cache=merged)[0]) for token in TEXT])
    assert mlx_models.apart(batched, said(model, rotating(model, keep=0), TEXT, 1)) < 1e-4
    assert mlx_models.apart(batched[WINDOW:], said(model, rotating(model), TEXT, 1)[WINDOW:]) > 0.05


def test_sinks_do_not_depend_on_batching() -> None:
    engine = ours()
    texts = [mlx_models.tokens_of(80, seed=seed) for seed in (1, 2, 3)]
    alone = [under_policy(engine, 1, text=text) for text in texts]
    states = [engine.start(mlx_models.storage(engine, 32, WINDOW)) for _ in texts]
    found: list[list[np.ndarray[Any, Any]]] = [[] for _ in texts]
    for place in range(80):
        for state in states:
            gone = POLICY.eviction(state.length)
            if gone:
                state.evict(*gone)
        rows = engine.forward([Chunk(state, [text[place]], 1) for state, text in zip(states, texts, strict=True)])
        for kept, row in zip(found, rows, strict=True):
            kept.append(row)
    engine.close()
    for kept, wanted in zip(found, alone, strict=True):
        np.testing.assert_array_equal(np.concatenate(kept), wanted)


def test_mlx_lm_cannot_quantise_a_rotating_cache() -> None:
    with pytest.raises(NotImplementedError):
        RotatingKVCache(max_size=WINDOW, keep=SINKS).to_quantized(group_size=32, bits=8)


@pytest.mark.parametrize(("bits", "allowed"), [(16, 0.01), (8, 0.1), (4, 0.9)])
def test_window_and_sinks_with_quantised_cache(bits: int, allowed: float) -> None:
    engine = ours()
    int8 = under_policy(engine, 1, bits)
    np.testing.assert_array_equal(under_policy(engine, 7, bits), int8)
    assert mlx_models.apart(int8, under_policy(engine, 1)) < allowed
    engine.close()


def test_mlx_lm_cannot_batch_filled_quantised_caches() -> None:
    cache = QuantizedKVCache(group_size=32, bits=8)
    assert not hasattr(cache, "merge")


def test_filled_quantised_states_decode_together() -> None:
    engine = ours()
    states = [engine.start(mlx_models.storage(engine, bits)) for bits in (8, 4)]
    alone = [mlx_models.fed(engine, state, [*TEXT[:20], 3], [6])[-1] for state in states]
    for state in states:
        state.rewind(1)
    found = engine.forward([Chunk(state, [3], 1) for state in states])
    engine.close()
    for row, wanted in zip(found, alone, strict=True):
        np.testing.assert_array_equal(row[0], wanted)


@pytest.mark.parametrize("family", ["mistral with a window", "qwen2 with windows", "gemma2"])
def test_mlx_lm_ignores_declared_windows_and_engine_does_not(family: str) -> None:
    made, tokens = mlx_models.made(family), mlx_models.tokens_of(60)
    model, _ = load_model(made.files)
    wanted = mlx_models.expected(family, tokens)
    assert mlx_models.apart(np.array(model(mx.array([tokens]))[0]), wanted) > 0.1
    engine = MlxEngine(made.plan, made.files)
    assert mlx_models.apart(mlx_models.fed(engine, engine.start(made.plan.storage), tokens, [7]), wanted) < 1e-5
    engine.close()


def test_rope_theta_is_always_written() -> None:
    import json
    import shutil
    import tempfile
    from pathlib import Path

    made, tokens = mlx_models.made(FAMILY), mlx_models.tokens_of(60)
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "files"
        shutil.copytree(made.files, files)
        config = json.loads((files / "config.json").read_text())
        assert config.pop("rope_theta") == 500000.0 and config.pop("rope_scaling")
        (files / "config.json").write_text(json.dumps(config))
        model, _ = load_model(files)
        wrong = np.array(model(mx.array([tokens]))[0])
    assert mlx_models.apart(wrong, mlx_models.expected(FAMILY, tokens)) > 0.1
