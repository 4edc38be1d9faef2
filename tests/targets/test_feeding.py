"""`feed` gives an engine chunks that it accepts, and the logits that were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edgekit.contracts.engine import Chunk
from edgekit.contracts.feeding import feed, probe_tokens
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.testing import FakeEngine

TOKENS = list(range(5, 28))


class RecordingEngine(FakeEngine):
    """A fake engine that records the size and the logits of each chunk."""

    def __init__(self) -> None:
        super().__init__(max_chunk_tokens=7)
        self.sizes: list[tuple[int, int]] = []

    def forward(self, chunks: Sequence[Chunk]) -> list[Any]:
        self.sizes += [(len(chunk.tokens), chunk.num_logits) for chunk in chunks]
        return super().forward(chunks)


@pytest.mark.parametrize(
    ("num_logits", "chunk_tokens", "sizes"),
    [
        (0, None, [(7, 0), (7, 0), (7, 0), (2, 0)]),
        (2, None, [(7, 0), (7, 0), (7, 0), (2, 2)]),
        (9, None, [(7, 0), (7, 0), (7, 7), (2, 2)]),
        (23, 20, [(7, 7), (7, 7), (7, 7), (2, 2)]),
        (1, 11, [(7, 0), (7, 0), (7, 0), (1, 0), (1, 1)]),
        (1, 5, [(5, 0), (5, 0), (5, 0), (5, 0), (2, 0), (1, 1)]),
    ],
)
def test_feed_returns_the_last_logits(num_logits: int, chunk_tokens: int | None, sizes: list[tuple[int, int]]) -> None:
    engine = RecordingEngine()
    storage = KVCacheConfig(capacity_tokens=64, kv_bits=16)
    state = engine.start(storage)
    found = feed(engine, state, TOKENS, num_logits, chunk_tokens=chunk_tokens)
    assert engine.sizes == sizes
    assert state.position == len(TOKENS)
    plain, expected = engine.start(storage), []
    for token in TOKENS:
        expected += engine.forward([Chunk(plain, [token], 1)])
    assert found.shape == (num_logits, engine.capabilities.vocabulary) and found.dtype == np.float32
    np.testing.assert_array_equal(found, np.concatenate(expected)[len(TOKENS) - num_logits :])


def test_feed_of_no_tokens_makes_no_call() -> None:
    engine = RecordingEngine()
    state = engine.start(KVCacheConfig(capacity_tokens=64, kv_bits=16))
    assert feed(engine, state, []).shape == (0, engine.capabilities.vocabulary)
    assert engine.sizes == []


def test_probe_tokens_are_within_the_vocabulary_and_differ() -> None:
    tokens = probe_tokens(64, 300)
    assert tokens == probe_tokens(80, 300)[:64]
    assert all(0 <= token < 300 for token in tokens) and len(set(tokens)) > 50
