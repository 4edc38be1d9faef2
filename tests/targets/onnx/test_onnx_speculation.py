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
from edgekit_onnx.runner import BodyCall
from engines import Model, onnx_model
from runtimes import codec

from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVCacheConfig

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]

SIZE = codec().vocabulary
STORAGE = KVCacheConfig(capacity_tokens=96, kv_bits=32)


@pytest.fixture(scope="module", params=["s4-g32", "s4-g64"])
def made(request: pytest.FixtureRequest) -> Model:
    return onnx_model("llama", request.param, FAST, config={"vocab_size": SIZE}, exits=(1, 2), context=96, sequences=3)


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
def test_verifying_after_exit_is_bitwise_equal(made: Model, draft: Any, exit_: int) -> None:
    tokens, drafted = draft
    for length in (7, 8, 31):
        history = list(models.tokens_of(length))
        engine = made.open(exact=True)
        expected = rows_of(engine, history, tokens, [], exit_)
        assert np.array_equal(rows_of(engine, history, tokens, drafted, exit_), expected)
        engine.close()


@pytest.mark.usefixtures("own_operators")
def test_drafting_layers_do_not_run_again(made: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made.open(exact=True)
    runner, ran = engine._runner, []
    body = runner.body

    def counted(running: Any, slab: Any, row: int, call: BodyCall) -> None:
        ran.append((call.start, call.stop, call.ids.shape[1]))
        body(running, slab, row, call)

    state = engine.start(STORAGE)
    engine.forward([Chunk(state, [1, 2, 3, 4], 0)])
    for token in (5, 6, 7):
        engine.forward([Chunk(state, [token], 1, exit_layer=2)])
    state.rewind(3)
    monkeypatch.setattr(runner, "body", counted)
    engine.forward([Chunk(state, [5, 6, 7, 8], 4)])
    assert ran == [(0, 2, 2), (2, 3, 4)]  # the last token and its spare one; then the rest of the layers
    engine.close()


def test_moved_state_drops_drafted_hidden_states(made: Model) -> None:
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
