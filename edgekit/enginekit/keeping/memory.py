"""The scores that a state adds up from one eviction to the next: one number for each cached token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgekit.contracts.kv_policy import Eviction


class ScoreMemory:
    """Scores of the first tokens of a state; later ones have none yet.

    `add` says what the scores would become, `evict` makes it so: a state that is scored twice is scored equally.
    """

    def __init__(self) -> None:
        self._total = np.zeros(0, np.float32)
        self._next: NDArray[np.float32] | None = None

    def add(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the scores of all cached tokens with those of former evictions."""
        self._next = scores.copy()
        self._next[: len(self._total)] += self._total
        return self._next

    def evict(self, spans: Sequence[Eviction]) -> None:
        """Take over what was added last, and drop the spans."""
        if self._next is not None:
            self._total, self._next = self._next, None
        dropped = [place for start, stop in spans for place in range(start, min(stop, len(self._total)))]
        self._total = np.delete(self._total, dropped)

    def cut(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        self._total, self._next = self._total[:length], None

    @property
    def bytes(self) -> int:
        return self._total.nbytes

    def save(self) -> NDArray[np.float32]:
        return self._total.copy()

    def restore(self, scores: NDArray[np.float32]) -> None:
        self._total, self._next = scores.copy(), None
