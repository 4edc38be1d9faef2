"""How often proposals are right, place by place: counts that fade, for one kind of proposal."""

from __future__ import annotations

FADING = 0.98  # what a count is worth one trial later: some fifty trials are remembered
_PRIOR_TRIALS = 3.0
_FEW_TRIALS = 4.0
_FIRST_GUESS = 0.65  # of a first place, before anything was seen


class Acceptance:
    """Chance that a place of a proposal is right when all before it were; `parent` speaks without evidence."""

    def __init__(self, parent: Acceptance | None = None, guess: float = _FIRST_GUESS) -> None:
        self._parent = parent
        self._guess: float = parent._guess if parent else guess
        self._right: list[float] = []
        self._tried: list[float] = []
        self._reached: list[float] = []  # chance that a place and all before it are right; made when asked for

    def observe(self, right: int, proposed: int) -> None:
        """`right` of `proposed` tokens were accepted; what came after the first wrong one says nothing."""
        for place in range(min(right + 1, proposed)):
            if place == len(self._tried):
                self._right.append(0.0)
                self._tried.append(0.0)
            self._right[place] = self._right[place] * FADING + (place < right)
            self._tried[place] = self._tried[place] * FADING + 1.0
        self._reached.clear()
        if self._parent is not None:
            self._parent.observe(right, proposed)

    def rate(self, place: int) -> float:
        """The chance at that place. What is not known is taken from other requests, then from the place before."""
        rate, right, tried = self._guess, self._right, self._tried
        others = self._parent
        for each in range(place + 1):
            own_right, own_tried = (right[each], tried[each]) if each < len(tried) else (0.0, 0.0)
            if others is not None and each < len(others._tried):
                # The parent has seen this request's proposals too: the same evidence does not count twice.
                their_tried = max(0.0, others._tried[each] - own_tried)
                their_right = min(their_tried, max(0.0, others._right[each] - own_right))
                rate = (their_right + _PRIOR_TRIALS * rate) / (their_tried + _PRIOR_TRIALS)
            rate = (own_right + _PRIOR_TRIALS * rate) / (own_tried + _PRIOR_TRIALS)
        return rate

    def expected(self, count: int) -> float:
        """How many of `count` proposed tokens will be accepted."""
        while len(self._reached) < count:
            place = len(self._reached)
            self._reached.append(self.rate(place) * (self._reached[-1] if place else 1.0))
        return sum(self._reached[:count])

    @property
    def is_new(self) -> bool:
        """Whether hardly anything was seen, here or by the parent."""
        seen = (self._parent or self)._tried
        return not seen or seen[0] < _FEW_TRIALS
