"""Feeds tokens to an engine's state in chunks of accepted size, and makes fixed tokens for probes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from edgekit.contracts.engine import Chunk

if TYPE_CHECKING:
    from edgekit.contracts.engine import Engine, Logits, State


def feed(
    engine: Engine, state: State, tokens: Sequence[int], num_logits: int = 0, *, chunk_tokens: int | None = None
) -> Logits:
    """Feed all of `tokens` and return a copy of the logits after the last `num_logits` of them, as float32.

    Tokens with requested logits are fed in chunks of their own. `chunk_tokens` limits chunks in addition to the
    engine's own limit.
    """
    step = min(engine.capabilities.max_chunk_tokens, chunk_tokens or len(tokens) or 1)
    first = len(tokens) - num_logits
    for start in range(0, first, step):
        engine.forward([Chunk(state, tokens[start : min(start + step, first)], 0)])
    logits = np.empty((num_logits, engine.capabilities.vocabulary), np.float32)
    for start in range(first, len(tokens), step):
        chunk = tokens[start : start + step]
        logits[start - first : start - first + len(chunk)] = engine.forward([Chunk(state, chunk, len(chunk))])[0]
    return logits


def probe_tokens(count: int, vocabulary: int) -> list[int]:
    """Return `count` fixed token ids, spread over the vocabulary; the same on every machine."""
    return [(7 + index * 2_654_435_761) % vocabulary for index in range(count)]
