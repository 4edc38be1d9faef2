"""The target's hidden states of one request, kept between the engine and a drafter that reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from edgekit.contracts.engine import Features


class HiddenRun(NamedTuple):
    """Hidden states of consecutive tokens, from position `start` of the text on."""

    start: int
    rows: Features


class HiddenLog:
    """Collects the hidden states of verified tokens until the drafter takes them."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.most_tokens = 0  # number of newest tokens whose hidden states are kept; 0: none
        self.read_from = 0  # the drafter reads hidden states from this length of the text on
        self._runs: list[HiddenRun] = []
        self._asked: Features | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(run.rows) for run in self._runs)

    def ask(self, tokens: int, length: int, later: int = 0) -> Features | None:
        """Return the array for a chunk's hidden states, None if not needed.

        `length`: the most tokens that the text can have at the next proposal. `later` known tokens follow the chunk.
        """
        is_wanted = tokens > 0 and later < self.most_tokens and length >= self.read_from
        self._asked = np.empty((tokens, self._width), np.float32) if is_wanted else None
        return self._asked

    def keep(self, position: int, wrong: int = 0) -> None:
        """Keep the rows of the last chunk, which ended at `position`, except the last `wrong` ones."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        self._runs.append(HiddenRun(position - len(asked), asked[: len(asked) - wrong]))
        while self.num_tokens - len(self._runs[0].rows) >= self.most_tokens:
            del self._runs[0]

    def take(self) -> list[HiddenRun]:
        """Return and forget the kept hidden states, in order."""
        runs, self._runs = self._runs, []
        return runs
