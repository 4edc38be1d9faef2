"""Acceptance rates of one kind of proposal, by position in the proposal, from decaying counts."""

from __future__ import annotations

DECAY = 0.98  # factor per later trial: about the last fifty trials count
_PRIOR_TRIALS = 3.0
_FEW_TRIALS = 4.0
_FIRST_GUESS = 0.65  # rate of the first position before any trial


class Acceptance:
    """The chance that a position of a proposal is right, given that all positions before it were.

    `parent` has the trials of all requests; its rates are the prior.
    """

    def __init__(self, parent: Acceptance | None = None, guess: float = _FIRST_GUESS) -> None:
        self._parent = parent
        self._guess: float = parent._guess if parent else guess
        self._right: list[float] = []
        self._tried: list[float] = []
        self._forget()

    def observe(self, right: int, proposed: int) -> None:
        """Count a proposal whose first `right` tokens were accepted; they and the first wrong token are trials."""
        for index in range(min(right + 1, proposed)):
            if index == len(self._tried):
                self._right.append(0.0)
                self._tried.append(0.0)
            self._right[index] = self._right[index] * DECAY + (index < right)
            self._tried[index] = self._tried[index] * DECAY + 1.0
        self._forget()
        if self._parent is not None:
            self._parent.observe(right, proposed)

    def expected(self, count: int) -> float:
        """Estimate how many of `count` proposed tokens will be accepted."""
        while len(self._expected) <= count:
            self._rate = self._next_rate(len(self._expected) - 1)
            self._chance *= self._rate
            self._expected.append(self._expected[-1] + self._chance)
        return self._expected[count]

    def _next_rate(self, index: int) -> float:
        """Estimate the chance at `index`; priors: the rate of other requests, then the rate one position earlier."""
        rate, parent = self._rate, self._parent
        own_right, own_tried = (self._right[index], self._tried[index]) if index < len(self._tried) else (0.0, 0.0)
        if parent is not None and index < len(parent._tried):
            # The parent counts this request's trials too: subtract them, so that they count once.
            other_tried = max(0.0, parent._tried[index] - own_tried)
            other_right = min(other_tried, max(0.0, parent._right[index] - own_right))
            rate = (other_right + _PRIOR_TRIALS * rate) / (other_tried + _PRIOR_TRIALS)
        return (own_right + _PRIOR_TRIALS * rate) / (own_tried + _PRIOR_TRIALS)

    def _forget(self) -> None:
        """Drop the cache of `expected`: a number for every length of proposal, and the state behind the longest."""
        self._expected: list[float] = [0.0]
        self._rate, self._chance = self._guess, 1.0  # of the last position; of it and all before it

    @property
    def is_new(self) -> bool:
        """True until a few trials were counted in the parent, or here if there is none."""
        tried = (self._parent or self)._tried
        return not tried or tried[0] < _FEW_TRIALS
