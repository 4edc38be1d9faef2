"""The hidden states of an early exit for a state's newest tokens, so that verifying them skips those layers.

The keys and values of those layers stay in the state's slot after a rewind, which only moves the state's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class EarlyExitCache:
    """Tokens that were computed up to layer `exit`, from position `start` on, and their hidden states."""

    def __init__(self, exit_: int, start: int) -> None:
        self.exit, self.start = exit_, start
        self.tokens: list[int] = []
        self._hidden: list[NDArray[Any]] = []

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def add(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        """Append tokens and a copy of their hidden states."""
        self.tokens += tokens
        self._hidden.append(hidden[: len(tokens)].copy())

    def cut(self, stop: int) -> None:
        """Forget the tokens from position `stop` on."""
        count = max(0, stop - self.start)
        if count < len(self.tokens):
            self._hidden = [np.concatenate(self._hidden)[:count]] if count else []
            del self.tokens[count:]

    def shared(self, tokens: Sequence[int]) -> int:
        """Return the number of leading tokens that `tokens` has in common with the cached ones."""
        pairs = enumerate(zip(self.tokens, tokens, strict=False))
        return next((count for count, (a, b) in pairs if a != b), min(len(self.tokens), len(tokens)))

    def put(self, hidden: NDArray[Any], count: int) -> None:
        """Write the first `count` cached hidden states to the start of `hidden`."""
        hidden[:count] = np.concatenate(self._hidden)[:count]
