"""Guessing token by token with the target's own noise, penalties and shape: its choices, from other rows.

Knows nothing of where the rows come from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.runtime.drafting.request import Request

    Row = NDArray[np.float32]


def guess(
    request: Request, vocabulary: int, position: int, limit: int, row: Row, feed: Callable[[int], Row]
) -> list[int]:
    """At most `limit` tokens from `position` on; `row` is the first one's, `feed` takes a token and gives the next.

    The last guess is not fed: whether it is right is not known before the target has said so.
    """
    sampler = request.sampler.fork()
    grammar = request.grammar.fork() if request.grammar is not None else None
    found: list[int] = []
    while True:
        allowed = grammar.allowed() if grammar is not None else None
        token = sampler.choose(_fitted(row, vocabulary), position + len(found), allowed)
        found.append(token)
        if len(found) == limit or token in request.eos:
            return found
        sampler.observe(token)
        if grammar is not None:
            grammar.advance(token)
            if grammar.is_finished():
                return found
        row = feed(token)


def _fitted(row: Row, vocabulary: int) -> Row:
    """A row over the target's vocabulary: paddings differ in size, and nothing in them is ever chosen."""
    if len(row) == vocabulary:
        return row
    if len(row) > vocabulary:
        return row[:vocabulary]
    wide = np.full(vocabulary, -np.inf, np.float32)
    wide[: len(row)] = row
    return wide
