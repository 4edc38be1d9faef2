"""Draft token by token with the target's own sampler and grammar, on the logits of another model or exit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.runtime.speculation.draft_method import DraftRequest

    TokenLogits = NDArray[np.float32]  # [vocabulary]


def draft(
    request: DraftRequest,
    vocabulary: int,
    position: int,
    limit: int,
    logits: TokenLogits,
    feed: Callable[[int], TokenLogits],
) -> list[int]:
    """Return at most `limit` tokens for the positions from `position` on.

    Args:
        logits: those for the first token.
        feed: feeds a token and returns the logits for the next one. The last token of the draft is not fed.
    """
    sampler = request.sampler.fork()
    grammar = request.grammar.fork() if request.grammar is not None else None
    tokens: list[int] = []
    while True:
        allowed = grammar.allowed() if grammar is not None else None
        logits = _resized(logits, vocabulary)
        if allowed is not None and not np.isfinite(logits[allowed]).any():
            return tokens  # none of the allowed tokens is in the draft's vocabulary
        token = sampler.choose(logits, position + len(tokens), allowed)
        tokens.append(token)
        if len(tokens) == limit or token in request.eos:
            return tokens
        sampler.observe(token)
        if grammar is not None:
            grammar.advance(token)
            if grammar.is_finished():
                return tokens
        logits = feed(token)


def _resized(logits: TokenLogits, vocabulary: int) -> TokenLogits:
    """Cut or pad logits to the target's vocabulary: models pad theirs differently, and padding is never chosen."""
    if len(logits) == vocabulary:
        return logits
    if len(logits) > vocabulary:
        return logits[:vocabulary]
    padded = np.full(vocabulary, -np.inf, np.float32)
    padded[: len(logits)] = logits
    return padded
