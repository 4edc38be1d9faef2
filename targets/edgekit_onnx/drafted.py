"""What an early exit said of a state's newest tokens, kept so that verifying them need not run those layers again.

The keys and values of those layers are still in the state's row: a rewind only moves its end. Knows nothing of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Drafted:
    """Tokens that left at layer `exit`, from position `start` of the state on, and their hidden states."""

    def __init__(self, exit_: int, start: int) -> None:
        self.exit, self.start = exit_, start
        self.tokens: list[int] = []
        self._hidden: list[NDArray[Any]] = []

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def add(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        """The next ones: a copy of their hidden states is kept."""
        self.tokens += tokens
        self._hidden.append(hidden[: len(tokens)].copy())

    def cut(self, stop: int) -> None:
        """Forget those from position `stop` on."""
        count = max(0, stop - self.start)
        if count < len(self.tokens):
            self._hidden = [np.concatenate(self._hidden)[:count]] if count else []
            del self.tokens[count:]

    def shared(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` are the same from the first on."""
        count = 0
        for mine, other in zip(self.tokens, tokens, strict=False):
            if mine != other:
                break
            count += 1
        return count

    def put(self, hidden: NDArray[Any], count: int) -> None:
        """Write the first `count` hidden states to the start of `hidden`."""
        hidden[:count] = np.concatenate(self._hidden)[:count]
