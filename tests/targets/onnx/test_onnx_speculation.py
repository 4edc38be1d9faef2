"""No drafter changes a text in exact mode on onnxruntime; verifying continues from an early exit's hidden states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import family_models as models
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import FAST
from onnx_models import OnnxModel, onnx_model
from runtimes import codec
from speculating import SOURCES

from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.speculation.drafters import DrafterFactory
from edgekit.testing import FakeEngine

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]

SIZE = codec().vocabulary
STORAGE = KVCacheConfig(capacity_tokens=96, kv_bits=32)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 4},
    "penalised": {"temperature": 0.8, "top_k": 30, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 6},
    "a regular expression": {"regex": r"([a-c]{2} ){6}", "temperature": 1.0, "seed": 7},
}
KEPT = {
    "everything": (STORAGE, KVEvictionPolicy()),
    "a window": (KVCacheConfig(capacity_tokens=24, kv_bits=32), KVEvictionPolicy.of(24, 3)),
}
PROMPTS = ([5, 6, 7] * 6, list(range(60, 75)))


@pytest.fixture(scope="module", params=["s4-g32", "s4-g64"])
def made(request: pytest.FixtureRequest) -> OnnxModel:
    return onnx_model("llama", request.param, FAST, config={"vocab_size": SIZE}, exits=(1, 2), context=96, sequences=3)


def opened(made: OnnxModel, kept: str, drafter: str | None, text: list[int]) -> Runtime:
    engine = made.open(exact=True)
    storage, policy = KEPT[kept]
    source: DrafterFactory | None = None
    if drafter is not None:
        # The same model drafts for itself, or a fake one that is hardly ever right.
        draft = made.open(exact=True) if "model" in drafter else FakeEngine(vocabulary=SIZE)
        held = storage if "model" in drafter else KVCacheConfig(capacity_tokens=96, kv_bits=16)
        source = SOURCES[drafter](engine, draft, held, text)
    return Runtime(engine, codec(), kv_config=storage, policy=policy, sequences=3, chunk_tokens=16, drafting=source)


@pytest.fixture(scope="module")
def plain(made: OnnxModel) -> dict[tuple[str, str], list[tuple[int, ...]]]:
    found = {}
    for kept in KEPT:
        with opened(made, kept, None, []) as runtime:
            for name, sampling in SAMPLINGS.items():
                found[kept, name] = [runtime.complete(each, max_tokens=30, **sampling).tokens for each in PROMPTS]
    return found


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("drafter", SOURCES)
def test_drafters_do_not_change_text(made: OnnxModel, plain: Any, drafter: str, kept: str) -> None:
    with opened(made, kept, drafter, list(plain[kept, "greedy"][0])) as runtime:
        for name, sampling in SAMPLINGS.items():
            streams = [runtime.submit(prompt, max_tokens=30, **sampling) for prompt in PROMPTS]
            assert [stream.answer().tokens for stream in streams] == plain[kept, name], name
        metrics = runtime.metrics()
    assert metrics.proposed > 0 or drafter.startswith("adapting")
    if drafter == "a draft model":
        assert metrics.accepted > 0.8 * metrics.proposed  # it thinks alike


def rows_of(engine: OnnxEngine, history: list[int], tokens: list[int], drafted: list[int], exit_: int) -> np.ndarray:
    """Logits of verifying `tokens`, after `drafted` were fed at the exit one by one and rewound."""
    state = engine.start(STORAGE)
    for start in range(0, len(history), 16):
        engine.forward([Chunk(state, history[start : start + 16], 0)])
    for token in drafted:
        engine.forward([Chunk(state, [token], 1, exit_layer=exit_)])
    state.rewind(len(drafted))
    rows = engine.forward([Chunk(state, tokens, len(tokens))])[0].copy()
    after = engine.forward([Chunk(state, [9, 8], 2)])[0].copy()  # what stayed in the cache is right too
    state.close()
    return np.concatenate([rows, after])


DRAFTS = {
    "all but the last": ([5, 6, 7, 8], [5, 6, 7]),
    "all of it": ([5, 6, 7], [5, 6, 7]),
    "the first alone": ([5, 6, 7, 8, 9], [5]),
    "more than is verified": ([5, 6], [5, 6, 7, 8]),
    "another second token": ([5, 6, 7], [5, 60, 7]),
    "nothing of it": ([5, 6, 7], [70, 71]),
}


@pytest.mark.parametrize("exit_", [1, 2])
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_verifying_after_exit_is_bitwise_equal(made: OnnxModel, draft: Any, exit_: int) -> None:
    tokens, drafted = draft
    for length in (7, 8, 31):
        history = list(models.tokens_of(length))
        engine = made.open(exact=True)
        expected = rows_of(engine, history, tokens, [], exit_)
        assert np.array_equal(rows_of(engine, history, tokens, drafted, exit_), expected)
        engine.close()


def test_drafting_layers_do_not_run_again(made: OnnxModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made.open(exact=True)
    runner, ran = engine._runner, []
    body = runner.body

    def counted(running: Any, slab: Any, row: int, ids: Any, lengths: Any, stop: int, *, start: int = 0) -> None:
        ran.append((start, stop, ids.shape[1]))
        body(running, slab, row, ids, lengths, stop, start=start)

    state = engine.start(STORAGE)
    engine.forward([Chunk(state, [1, 2, 3, 4], 0)])
    for token in (5, 6, 7):
        engine.forward([Chunk(state, [token], 1, exit_layer=2)])
    state.rewind(3)
    monkeypatch.setattr(runner, "body", counted)
    engine.forward([Chunk(state, [5, 6, 7, 8], 4)])
    assert ran == [(0, 2, 2), (2, 3, 4)]  # the last token and its spare one; then the rest of the layers
    engine.close()


def test_moved_state_drops_drafted_hidden_states(made: OnnxModel) -> None:
    engine = made.open(exact=True)
    history, tokens = list(models.tokens_of(9)), [5, 6, 7]
    expected = rows_of(engine, history, tokens, [], 1)
    first = engine.start(STORAGE)
    second = engine.start(STORAGE)
    engine.forward([Chunk(first, [1, 2, 3], 0)])
    engine.forward([Chunk(second, history, 0)])
    for token in tokens[:2]:
        engine.forward([Chunk(second, [token], 1, exit_layer=1)])
    second.rewind(2)
    first.close()  # the second state now lives in its row
    assert np.array_equal(engine.forward([Chunk(second, tokens, 3)])[0], expected[:3])
    engine.close()
