"""When to draft and how far: by measured acceptance, by the measured cost of verifying, and never past a small debt.

Everything is held against plain decoding: a step that verifies g proposals takes as long as c(g+1) + draft, and gives
one token more than are accepted. What it gains goes into a purse, what it loses comes out of it; beyond three
steps and 0.3 % of the time, only gains are spent. No step verifies more rows than memory was admitted for. It
knows nothing of tokens, engines or who proposes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from edgekit.memory import verified_rows
from edgekit.runtime.drafting.acceptance import Acceptance
from edgekit.runtime.drafting.costs import Costs

ALLOWED_LOSS = 0.003  # of all time
_FIRST_CREDIT = 3.0  # plain steps that may be lost before anything was gained
_MOST_CREDIT = 40.0  # plain steps of gains that are kept for worse times
_WORTH = 1.02  # drafting must promise this much
_PLAIN_EVERY = 32  # while drafting pays, one step in so many is plain, to see what plain steps take now
_FIRST_PLAIN = 4  # plain steps of a company before it may draft
_FIRST_QUIET, _LONGEST_QUIET = 8, 128  # steps without drafting before it is tried again
_LOOK_EVERY = 8  # of plain steps in a row, one in so many is learned from: learning costs too, beside a small model
_SHARE = 0.1  # of a new measurement in a moving mean
_OUTLIER = 3.0


class Asking(Protocol):
    """What a drafter's proposals cost."""

    def draft_s(self, tokens: int) -> float:
        """Seconds to draft so many, when nothing waits to be read."""


class Step(NamedTuple):
    """One step of the loop, as it was."""

    chunks: Sequence[int]  # tokens of each decoding sequence's chunk
    prefill: bool  # whether prompts were read too: then its time says nothing of decoding
    tokens: int  # that the step gave
    engine_s: float
    total_s: float


class Choice(NamedTuple):
    """How many tokens to propose, and the speed-up that this promises (1: as plain decoding)."""

    tokens: int
    speed_up: float


class Pace:
    """Decides for all requests of one runtime. The loop tells it when a step begins and how it went."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._slowness = 1.0  # measured over calibrated seconds of a forward, now
        self._bent: dict[int, float] = {}  # by chunk tokens: what their cost is over what was calibrated
        self._host_s = 0.0  # of a plain step, outside the engine
        self._extra_s = 0.0  # of a drafting step, beyond that, the engine and drafting itself
        self._together: dict[int, list[float]] = {}  # by company: mean seconds of a plain step, and how many were seen
        self._strain: dict[int, float] = {}  # by company: measured over predicted seconds of a drafting step
        self._company = 1
        self._since_plain = 0
        self._unseen = 0  # plain steps since the last that was learned from
        self._drafting_s = 0.0  # of the step that is being prepared, as predicted
        self._purse_s = _FIRST_CREDIT * costs.one
        self.plain_s = self.spent_s = 0.0  # what all decoding steps would have taken, and what they took
        self.steps = self.drafted_steps = self.tokens = 0
        self.in_debt = False
        self.promised: float | None = None  # the speed-up that the newest decision counts on

    @property
    def costs(self) -> Costs:
        return self._costs

    @property
    def slowness(self) -> float:
        return self._slowness

    def begin(self, company: int) -> None:
        """A step begins in which so many sequences decode."""
        self._company, self._drafting_s = company, 0.0

    def plain_step_s(self) -> float:
        """A plain step, of the company that is decoding now."""
        if self._company > 1:
            return self._together[self._company][0]
        return self._costs.one * self._slowness + self._host_s

    def verify_s(self, rows: int) -> float:
        """A forward of one sequence's `rows` tokens, now."""
        return self._costs.of(rows) * self._bend(rows) * self._slowness

    def _strain_of(self, company: int) -> float:
        """Before it was seen: drafting steps gain from company as much as plain ones, which the first tries correct."""
        if company == 1:
            return 1.0
        known = self._strain.get(company)
        return known or self._together[company][0] / (company * self.verify_s(1) + self._host_s)

    def _bend(self, rows: int) -> float:
        """What is known of the nearest size."""
        if rows == 1 or not self._bent:
            return 1.0
        found = self._bent.get(rows)
        return found if found is not None else self._bent[min(self._bent, key=lambda size: abs(size - rows))]

    def choose(self, acceptance: Acceptance, asking: Asking, limit: int, *, trying: bool = False) -> Choice:
        """How far to draft. `trying`: the best length even where it does not pay, as long as a loss is allowed."""
        plain, company = self.plain_step_s(), self._company
        fixed_s = self._host_s + self._extra_s
        strain = self._strain_of(company)
        best, best_s = Choice(0, 0.0), 0.0
        most = min(limit, self._costs.most - 1, verified_rows(company) // max(1, company) - 1)
        for count in range(1, most + 1):
            seconds = strain * ((self.verify_s(count + 1) + asking.draft_s(count)) * company + fixed_s)
            speed_up = (1.0 + acceptance.expected(count)) * plain / seconds
            if speed_up > best.speed_up:
                best, best_s = Choice(count, speed_up), seconds
        if not trying and not self.pays(best.speed_up):
            return Choice(0, best.speed_up)
        self.in_debt = best_s - plain > self._purse_s
        return Choice(0, best.speed_up) if self.in_debt else best

    @staticmethod
    def pays(speed_up: float) -> bool:
        return speed_up > _WORTH

    @property
    def pays_but_for_debt(self) -> bool:
        """Whether it is off only because of what it lost."""
        return self.promised is not None and self.pays(self.promised) and self.in_debt

    @property
    def is_due_plain(self) -> bool:
        """Whether the coming step has to be plain, to see what plain steps take now."""
        if self._since_plain >= _PLAIN_EVERY:
            return True
        return self._company > 1 and self._together.get(self._company, (0.0, 0))[1] < _FIRST_PLAIN

    def announce(self, drafting_s: float, invested_s: float = 0.0) -> None:
        """The coming step spends so much on drafting; what is invested beyond that, its own gain need not cover."""
        self._drafting_s += drafting_s + invested_s
        self._purse_s += invested_s

    def affords(self, seconds: float) -> bool:
        return seconds <= self._purse_s

    def passes(self) -> bool:
        """Whether a step in which one sequence was given one token may pass unseen: it went as those before it."""
        if self._since_plain or self._unseen + 1 >= _LOOK_EVERY:
            return False
        self._unseen += 1
        return True

    def end(self, step: Step) -> None:
        """Learn from a step, and take those that passed unseen for the same."""
        company = len(step.chunks)
        if step.prefill or not company:
            return
        drafted, like = max(step.chunks) > 1, 1
        if company == 1 and not drafted:
            like, self._unseen = 1 + self._unseen, 0
        self.steps += like
        self.tokens += like * step.tokens
        self.drafted_steps += drafted
        self._since_plain = self._since_plain + 1 if drafted else 0
        self._company = company
        if company == 1:
            self._learn_alone(step.chunks[0], step.engine_s, step.total_s - step.engine_s)
        elif not self._learn_together(step, company, drafted):
            return
        self._account(step, company, drafted, like)

    def _account(self, step: Step, company: int, drafted: bool, like: int) -> None:
        """What so many steps like this gained or lost against plain ones goes into the purse or out of it."""
        spent_s = plain_s = like * step.total_s
        gained = ALLOWED_LOSS * spent_s
        if drafted:
            plain_s = step.tokens / company * self.plain_step_s()
            # Where something else took the machine in the middle of the step, that is no fault of drafting.
            usual_s = sum(map(self.verify_s, step.chunks)) + self._drafting_s + self._host_s
            gained += plain_s - min(step.total_s, 2.0 * usual_s)
        self.plain_s += plain_s
        self.spent_s += spent_s
        self._purse_s = min(self._purse_s + gained, _MOST_CREDIT * self.plain_step_s())

    def _learn_alone(self, rows: int, engine_s: float, host_s: float) -> None:
        """Plain steps say how fast the machine is now; drafting ones, mostly, how their cost differs from that."""
        known, one = self._slowness, self._costs.one
        if rows == 1:
            self._slowness = known = known + 2 * _SHARE * (min(engine_s / one, _OUTLIER * known) - known)
            self._host_s += _SHARE * (min(host_s, one * known) - self._host_s)
            return
        bent, calibrated = self._bend(rows), self._costs.of(rows)
        seen = engine_s / (calibrated * known)
        self._bent[rows] = bent + _SHARE * (min(max(seen, bent / _OUTLIER), bent * _OUTLIER) - bent)
        self._slowness += 0.02 * (min(engine_s / (calibrated * bent), _OUTLIER * known) - known)

    def _learn_together(self, step: Step, company: int, drafted: bool) -> bool:
        """The same of several at once; whether a plain step of that company is known to compare with."""
        if not drafted:
            mean = self._together.setdefault(company, [step.total_s, 0])
            mean[0] += _SHARE * (min(step.total_s, _OUTLIER * mean[0]) - mean[0])
            mean[1] += 1
        elif company in self._together:
            predicted = sum(map(self.verify_s, step.chunks)) + step.total_s - step.engine_s
            strain = self._strain_of(company)
            self._strain[company] = strain + 3 * _SHARE * (min(step.total_s / predicted, _OUTLIER * strain) - strain)
        return company in self._together


def quieter(steps: int) -> int:
    """How long to be quiet after another try that did not pay."""
    return min(2 * steps, _LONGEST_QUIET)


FIRST_QUIET = _FIRST_QUIET
