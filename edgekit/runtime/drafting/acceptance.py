"""How often proposals are right, place by place: counts that fade, for one kind of proposal."""

from __future__ import annotations

FADING = 0.98  # what a count is worth one trial later: some fifty trials are remembered
_PRIOR_TRIALS = 3.0
_FIRST_GUESS = 0.65  # of a first place, before anything was seen


class Acceptance:
    """Chance that a place of a proposal is right when all before it were; `parent` speaks without evidence."""

    def __init__(self, parent: Acceptance | None = None, guess: float = _FIRST_GUESS) -> None:
        self._parent, self._guess = parent, guess
        self._right: list[float] = []
        self._tried: list[float] = []
        self._means: list[float] = []  # products up to each place, made when asked for

    def observe(self, right: int, proposed: int) -> None:
        """`right` of `proposed` tokens were accepted; what came after the first wrong one says nothing."""
        for place in range(min(right + 1, proposed)):
            if place == len(self._tried):
                self._right.append(0.0)
                self._tried.append(0.0)
            hit = place < right
            self._right[place] = self._right[place] * FADING + hit
            self._tried[place] = self._tried[place] * FADING + 1.0
        self._means = []
        if self._parent is not None:
            self._parent.observe(right, proposed)

    def rate(self, place: int) -> float:
        """The chance at that place. Without evidence of its own it is the parent's, or that of the place before."""
        if self._parent is not None:
            prior = self._parent.rate(place)
        else:
            prior = self.rate(max(0, min(place, len(self._tried)) - 1)) if place else self._guess
        if place >= len(self._tried):
            return prior
        return (self._right[place] + _PRIOR_TRIALS * prior) / (self._tried[place] + _PRIOR_TRIALS)

    def expected(self, count: int) -> float:
        """How many of `count` proposed tokens will be accepted."""
        while len(self._means) < count:
            place = len(self._means)
            self._means.append(self.rate(place) * (self._means[-1] if place else 1.0))
        return sum(self._means[:count])

    @property
    def trials(self) -> float:
        """Evidence of its own on the first place, faded."""
        return self._tried[0] if self._tried else 0.0
