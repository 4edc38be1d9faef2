"""The conformance check of hidden states that chunks collect, for engines with and without this ability."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edgekit.contracts.engine import Chunk, Engine, State
from edgekit.contracts.feeding import feed
from edgekit.testing.judging import Judge, refused, require, storage_for, words

if TYPE_CHECKING:
    from edgekit.contracts.engine import Features, Logits


def check_features(engine: Engine, judge: Judge) -> None:
    """Hidden states do not depend on how tokens were chunked, and requesting them does not change logits."""
    able = engine.capabilities
    tokens = words(engine, np.random.default_rng(10), 12)

    def asked(state: State, start: int, stop: int) -> tuple[Logits, Features]:
        hidden = np.full((stop - start, able.feature_width or 1), np.nan, np.float32)
        return engine.forward([Chunk(state, tokens[start:stop], 1, features=hidden)])[0], hidden

    if not able.feature_layers:
        refused(lambda: asked(engine.start(storage_for(engine)), 0, 1), "hidden states of an engine that gives none")
        return
    plain = engine.start(storage_for(engine))
    expected = feed(engine, plain, tokens, 1)
    plain.close()
    rows = []
    for size in (len(tokens), 5, 1):
        state, parts = engine.start(storage_for(engine)), []
        for start in range(0, len(tokens), min(size, able.max_chunk_tokens)):
            logits, hidden = asked(state, start, min(start + min(size, able.max_chunk_tokens), len(tokens)))
            parts.append(hidden)
        judge.same(logits, expected, f"logits beside hidden states, in chunks of {size}")
        rows.append(np.concatenate(parts))
        judge.same(rows[-1], rows[0], f"hidden states in chunks of {size}")
        state.close()
    if able.max_rewind is None or able.max_rewind >= 3:
        state = engine.start(storage_for(engine))
        feed(engine, state, tokens)
        state.rewind(3)
        _, hidden = asked(state, len(tokens) - 3, len(tokens))
        judge.same(hidden, rows[0][-3:], "hidden states after a rewind")
        state.close()
    require(bool(np.isfinite(rows[0]).all()) and len(np.unique(rows[0], axis=0)) > 1, "hidden states were not written")
    states = [engine.start(storage_for(engine)) for _ in range(min(3, able.max_states))]
    for state in states:
        feed(engine, state, tokens[:-1])
    lasts = [np.empty((1, able.feature_width), np.float32) for _ in states]
    silent = len(states) // 2 if len(states) > 1 else None  # requests no hidden states in the same call
    engine.forward([Chunk(s, tokens[-1:], 1, features=None if i == silent else lasts[i]) for i, s in enumerate(states)])
    for index, last in enumerate(lasts):
        if index != silent:
            judge.same(last, rows[0][-1:], "hidden states of one batch", batched=True)
    for state in states:
        state.close()
    narrow = np.empty((1, able.feature_width + 1), np.float32)
    refused(
        lambda: engine.forward([Chunk(engine.start(storage_for(engine)), [1], 0, features=narrow)]), "too wide an array"
    )
