"""One request's drafter where drafting has to pay: of all proposers it asks the one that promises most, or none.

It knows what proposals cost and how often they were right, not how they come about.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from edgekit.runtime.drafting.acceptance import Acceptance
from edgekit.runtime.drafting.pace import FIRST_QUIET, Choice, Pace, quieter
from edgekit.runtime.drafting.request import Rest

if TYPE_CHECKING:
    from edgekit.runtime.drafting.request import Request

_SHARE = 0.1
_FIRST_TOKENS = 3  # at most, while nothing is known of how often a proposal is right
_READING_GAIN = 2.0  # reading a long prompt must promise to gain this many times what it costs
_FRUITLESS_LOSS = 0.0025  # of a step, that looking for a proposal may cost where there is none
_TRIES = 4  # proposals in a row when it is tried again
_FREE_S = 3e-5  # a proposal that costs less is made before it is judged
_SEEN_TOKENS = 256  # of an answer that may come, so many are counted on


class Proposer(Protocol):
    """A drafter that says what it costs."""

    @property
    def grade(self) -> int:
        """What kind of proposal the last one was; kinds differ in how often they are right."""

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]: ...
    def observe(self, accepted: Sequence[int]) -> None: ...
    def close(self) -> None: ...

    def waiting_s(self, history: Sequence[int]) -> float:
        """Seconds to read what it has not seen of the text, apart from the newest token."""


class Kind(Protocol):
    """One way of proposing, for all requests of a runtime."""

    @property
    def name(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def bytes(self) -> int:
        """Memory that it takes beside the target's own."""

    def start(self, request: Request) -> Proposer: ...
    def draft_s(self, tokens: int) -> float:
        """Seconds to draft so many, as calibrated."""

    def close(self) -> None: ...


class Record:
    """What was seen of one kind of proposer, by all requests."""

    def __init__(self, kind: Kind, pace: Pace) -> None:
        self.kind, self._pace = kind, pace
        self.is_free = kind.draft_s(1) < _FREE_S
        self.by_grade: dict[int, Acceptance] = {}
        self.right: list[int] = []  # by place, not faded: for reports
        self.tried: list[int] = []
        self.proposed = self.accepted = 0
        self._bent = 1.0  # measured over calibrated seconds of drafting, beyond the machine's slowness

    def acceptance(self, grade: int) -> Acceptance:
        if grade not in self.by_grade:
            # The longer the run that agreed, the likelier is what followed it.
            self.by_grade[grade] = Acceptance(guess=(0.65, 0.4, 0.5, 0.65, 0.75)[min(grade, 4)])
        return self.by_grade[grade]

    def draft_s(self, tokens: int) -> float:
        """Seconds to draft so many, now."""
        return self.kind.draft_s(tokens) * self._bent * (1.0 if self.is_free else self._pace.slowness)

    def drafted(self, tokens: int, seconds: float) -> None:
        """Drafting so many took that long."""
        if tokens and not self.is_free:
            seen = seconds / (self.kind.draft_s(tokens) * self._pace.slowness)
            self._bent += _SHARE * (min(seen, 3 * self._bent) - self._bent)

    def judged(self, right: int, proposed: int) -> None:
        self.proposed += proposed
        self.accepted += right
        for place in range(min(right + 1, proposed)):
            if place == len(self.tried):
                self.right.append(0)
                self.tried.append(0)
            self.right[place] += place < right
            self.tried[place] += 1


class AdaptingDrafter:
    """Drafts as far as it pays. When it does not, it is quiet for a while, then tries again, a little."""

    def __init__(self, request: Request, records: Sequence[Record], pace: Pace) -> None:
        self._request, self._pace = request, pace
        self._records = records
        self._proposers = [record.kind.start(request) for record in records]
        self._own: dict[tuple[int, int], Acceptance] = {}
        self._quiet_until = 0  # as many tokens as the text has before the next try
        self._length = 0  # of the text, when it was asked last
        self._pause = FIRST_QUIET
        self._tries = 0
        self._pending: tuple[Record, Acceptance, Sequence[int]] | None = None
        self._looking_s = sum(record.kind.draft_s(1) for record in records if record.is_free)

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        self._pending = None
        self._length = len(history)
        if self._length < self._quiet_until:
            return Rest.of(self._quiet_until - self._length - 1)
        if self._pace.is_due_plain:
            return ()
        trying = self._pause > FIRST_QUIET  # it did not pay last time: a try, within what may be lost
        best: tuple[Choice, int, Sequence[int], Acceptance] | None = None
        offered: list[float] = []
        for place, (record, proposer) in enumerate(zip(self._records, self._proposers, strict=True)):
            ready: Sequence[int] = ()
            most = min(limit, record.kind.tokens)
            if record.is_free:
                ready = proposer.propose(history, most)
                if not ready:
                    continue
                most = len(ready)
            acceptance = self._acceptance(place, proposer.grade if record.is_free else 0)
            if acceptance.is_new:
                most = min(most, _FIRST_TOKENS)
            choice = self._pace.choose(acceptance, record, most, trying=trying)
            offered.append(choice.speed_up)
            if choice.tokens and not ready and not self._is_worth_reading(proposer, history, choice):
                continue
            if choice.tokens and (best is None or choice.speed_up > best[0].speed_up):
                best = choice, place, ready, acceptance
        if best is None:
            if offered:
                self._pace.promised = max(offered)
                self._rest()
            else:
                # Looking is nothing beside a large model's step; beside a small one's it is, so not every step looks.
                self._be_quiet(int(self._looking_s / (_FRUITLESS_LOSS * self._pace.plain_step_s())))
            return ()
        choice, place, ready, acceptance = best
        self._pace.promised = choice.speed_up
        pays = self._pace.pays(choice.speed_up)
        if pays:
            self._pause = FIRST_QUIET
        elif self._tries > 1:
            self._tries -= 1
        else:
            self._rest()
        record, proposer = self._records[place], self._proposers[place]
        if ready:
            proposal = ready[: choice.tokens]
        else:
            proposal = self._drafted(record, proposer, history, choice.tokens, pays)
        self._pending = record, acceptance, proposal
        return proposal

    def observe(self, accepted: Sequence[int]) -> None:
        if self._pending is None:
            return
        record, acceptance, proposal = self._pending
        right = 0
        for guess, token in zip(proposal, accepted, strict=False):
            if guess != token:
                break
            right += 1
        acceptance.observe(right, len(proposal))
        record.judged(right, len(proposal))
        if right == len(proposal) and right:
            self._pause = max(FIRST_QUIET, self._pause // 4)
            self._quiet_until = min(self._quiet_until, self._length + len(accepted) + self._pause)

    def close(self) -> None:
        for proposer in self._proposers:
            proposer.close()

    @property
    def newest(self) -> Record | None:
        """Who made the proposal that is being verified."""
        return self._pending[0] if self._pending else None

    def _acceptance(self, place: int, grade: int) -> Acceptance:
        if (place, grade) not in self._own:
            self._own[place, grade] = Acceptance(parent=self._records[place].acceptance(grade))
        return self._own[place, grade]

    def _drafted(
        self, record: Record, proposer: Proposer, history: Sequence[int], tokens: int, pays: bool
    ) -> Sequence[int]:
        waited_s = proposer.waiting_s(history)
        began = perf_counter()
        proposal = proposer.propose(history, tokens)
        taken_s = perf_counter() - began
        usual_s = record.draft_s(tokens)
        if waited_s == 0.0:
            self._pace.announce(usual_s)
            record.drafted(len(proposal), taken_s)
        elif pays:
            self._pace.announce(usual_s, max(0.0, taken_s - usual_s))
        else:
            self._pace.announce(usual_s + waited_s)
        return proposal

    def _is_worth_reading(self, proposer: Proposer, history: Sequence[int], choice: Choice) -> bool:
        """Whether what the rest of the answer may gain is well above what reading the text so far would cost."""
        seconds = proposer.waiting_s(history)
        if seconds == 0.0 or self._pace.affords(seconds):
            return True
        rest = min(self._request.last - len(history), _SEEN_TOKENS)
        gain_s = rest * self._pace.plain_step_s() * max(0.0, 1.0 - 1.0 / choice.speed_up)
        return gain_s > _READING_GAIN * seconds

    def _rest(self) -> None:
        self._be_quiet(self._pause)
        self._pause, self._tries = quieter(self._pause), _TRIES

    def _be_quiet(self, steps: int) -> None:
        """For so many steps after this one. A quiet step gives one token."""
        self._quiet_until = self._length + 1 + steps
