"""Conformance checks of a state's recurrent part: correct after rewinds, restores and drafts, with few replays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from edgekit.contracts.engine import Chunk, Engine
from edgekit.contracts.feeding import feed
from edgekit.testing.judging import CAPACITY, Judge, refused, require, storage_for, words

if TYPE_CHECKING:
    from edgekit.contracts.engine import Logits, Segment, State


def check_a_recurrent_part_follows(engine: Engine, judge: Judge) -> None:
    """After rewinds, restores and verified drafts, a state with a recurrent part gives the logits of plain decoding.

    It replays at most the tokens since the last checkpoint; without a recurrent part, none.
    """
    spacing, limit = engine.capabilities.checkpoint_tokens, engine.capabilities.max_rewind
    if spacing is None:
        state = engine.start(storage_for(engine))
        feed(engine, state, [1, 2, 3], 0)
        require(state.num_replayed == 0, "a state replays tokens, yet capabilities.checkpoint_tokens is none")
        state.close()
        return
    random = np.random.default_rng(10)
    length = min(CAPACITY - 12, 3 * spacing + spacing // 2)
    tokens = words(engine, random, length + 8)
    plain = engine.start(storage_for(engine))
    expected = feed(engine, plain, tokens, 8, chunk_tokens=1)
    plain.close()
    state = engine.start(storage_for(engine))
    feed(engine, state, tokens[:length], 0)
    if limit is None or limit >= 3:
        _check_drafts(engine, judge, state, tokens[length:], words(engine, random, 3), expected)
    if engine.capabilities.can_save:
        segment = state.save(0, length)
        require(segment.bytes == state.save_bytes(0, length), "save_bytes is not what save takes")
        state.close()
        for count in (length, length - 1, min(spacing, length), 1):
            _check_restored(engine, judge, segment, count, tokens[: length + 1], expected)
    state.close()
    if limit is None:
        _check_rewinds(engine, judge, tokens, expected)


def _check_drafts(
    engine: Engine, judge: Judge, state: State, rest: Sequence[int], wrong: Sequence[int], expected: Logits
) -> None:
    """Verify proposals whose first 0, 1 or 2 tokens are right."""
    fed = 0
    while fed < len(rest):
        right = list(rest[fed + 1 : fed + 1 + fed % 3])
        chunk = [rest[fed], *right, *wrong][: min(4, engine.capabilities.max_chunk_tokens)]
        accepted = min(len(right), len(chunk) - 1)
        rows = engine.forward([Chunk(state, chunk, len(chunk))])[0]
        state.rewind(len(chunk) - 1 - accepted)
        judge.same(rows[: accepted + 1], expected[fed : fed + accepted + 1], f"{accepted} drafts accepted after {fed}")
        require(state.num_replayed <= accepted, f"{state.num_replayed} tokens to replay of {accepted} accepted drafts")
        fed += 1 + accepted
    state.rewind(len(rest))


def _check_restored(
    engine: Engine, judge: Judge, segment: Segment, count: int, tokens: Sequence[int], expected: Logits
) -> None:
    spacing = engine.capabilities.checkpoint_tokens or 1
    state = engine.start(storage_for(engine))
    state.restore(segment.head(count))
    require(state.num_replayed < max(2, spacing), f"{state.num_replayed} tokens to replay of {count} restored")
    judge.same(feed(engine, state, tokens[count:], 1), expected[:1], f"restored {count} tokens")
    state.close()


def _check_rewinds(engine: Engine, judge: Judge, tokens: Sequence[int], expected: Logits) -> None:
    spacing, rows = engine.capabilities.checkpoint_tokens or 1, len(expected)
    state = engine.start(storage_for(engine))
    feed(engine, state, tokens, 0)
    state.rewind(rows)
    require(state.num_replayed < max(2, spacing), f"{state.num_replayed} tokens to replay after a rewind")
    judge.same(feed(engine, state, tokens[-rows:], rows), expected, "rewound")
    if engine.capabilities.can_evict:
        state.evict(0, 4)
        refused(lambda: state.rewind(1), "a rewind of a recurrent part past an eviction")
    state.close()
