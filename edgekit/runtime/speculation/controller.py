"""Decide when to draft and how many tokens, from the measured acceptance and the measured cost of verifying.

The reference is plain decoding. A step that verifies g proposed tokens takes c(g+1) plus the time to draft, and
generates the accepted tokens and one more. Tries, which do not promise to pay, share a loss budget that grows by 0.3 %
of the time. So that drafting can begin, the first requests add 1 % of the tokens that they ask for, up to three plain
steps: an answer of 40 tokens is not worth a trial that costs two. Steps that promise to pay may also lose again what
drafting has gained; tries may not, or a method that never pays would spend what another one gains. A step that could
lose more is not tried. No step verifies more tokens than memory was admitted for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from edgekit.planner.memory import verified_rows
from edgekit.runtime.speculation.acceptance import Acceptance
from edgekit.runtime.speculation.costs import Costs

ALLOWED_LOSS = 0.003  # share of the decoding time
_FIRST_LOSS = 0.01  # share of the tokens that the first requests ask for: allowed loss before the first gain
_FIRST_BUDGET = 3.0  # in plain steps: the most that these requests add
_MAX_BUDGET = 40.0  # in plain steps
_MIN_SPEED_UP = 1.02  # least expected speed-up at which drafting pays
_PLAIN_EVERY = 32  # while drafting pays, one step in this many is plain, to measure plain steps
_FIRST_PLAIN = 4  # plain steps to measure at a batch size before drafting
FIRST_BACKOFF, LONGEST_BACKOFF = 8, 128  # steps without drafting before the next try
_LEARN_EVERY = 8  # of plain steps in a row, learn from one in eight: learning takes too long for a small model
_NEW_SHARE = 0.1  # weight of a new measurement in a moving mean
_OUTLIER = 3.0  # a measurement counts as at most this many times the mean


class DraftCost(Protocol):
    """The cost of drafting."""

    def draft_s(self, tokens: int) -> float:
        """Seconds to draft `tokens` tokens if the drafter has already processed the text."""


class DraftStep(NamedTuple):
    """A measured step of the scheduler."""

    chunks: Sequence[int]  # tokens in the chunk of each decoding request
    prefill: bool  # prompts were processed too, so the time is not comparable
    tokens: int  # generated tokens
    engine_s: float
    total_s: float


class DraftLength(NamedTuple):
    """The number of tokens to propose, and the expected speed-up (1: plain decoding)."""

    tokens: int
    speed_up: float
    loss_s: float = 0.0  # if none of them is accepted

    @property
    def pays(self) -> bool:
        return SpeculationController.pays(self.speed_up)


class SpeculationController:
    """Decide on drafting for all requests of one runtime. The scheduler reports the start and the end of each step."""

    def __init__(self, costs: Costs, *, replays: bool = False) -> None:
        """`replays`: accepted drafts are computed again in the next step, for a recurrent part."""
        self._costs, self._replays = costs, replays
        self._slowness = 1.0  # recent measured / calibrated seconds of a forward
        self._correction: dict[float, float] = {}  # by tokens of a chunk: measured / calibrated relative cost
        self._host_s = 0.0  # time of a plain step outside the engine
        # By batch size: the mean seconds of a plain step and the number of measurements.
        self._plain_steps: dict[int, list[float]] = {}
        # By batch size: measured / predicted seconds of a drafting step.
        self._batch_correction: dict[int, float] = {}
        self._batch_size = 1
        self._since_plain = 0
        self._skipped = 0  # plain steps since the last reported one
        self._drafting_s = 0.0  # predicted drafting time of the next step
        self._loss_budget_s = self._gained_s = 0.0  # what tries may lose; what drafting has gained
        self._is_try = True  # nothing that is drafted in this step promises to pay
        self._first_budget = _FIRST_BUDGET  # what requests may still add
        self.plain_s = self.spent_s = 0.0  # all decoding steps: predicted without drafting, and measured
        self.steps = self.drafted_steps = self.tokens = 0
        self.is_overdrawn = False  # drafting is off only because the loss budget is used up
        self.promised: float | None = None  # expected speed-up of the latest decision

    @property
    def costs(self) -> Costs:
        return self._costs

    @property
    def slowness(self) -> float:
        return self._slowness

    def add_request(self, tokens: int) -> None:
        """Add to the loss budget for a new request that asks for at most `tokens` tokens."""
        added = min(_FIRST_LOSS * max(0, tokens), self._first_budget)
        self._first_budget -= added
        self._loss_budget_s += added * self._costs.one

    def begin(self, batch_size: int) -> None:
        """Start a step in which `batch_size` requests decode."""
        self._batch_size, self._drafting_s, self._is_try = batch_size, 0.0, True

    def plain_step_s(self) -> float:
        """Seconds of a plain step of the current batch size."""
        if self._batch_size > 1:
            return self._plain_steps[self._batch_size][0]
        return self._costs.one * self._slowness + self._host_s

    def verify_s(self, tokens: float) -> float:
        """Seconds of a forward of `tokens` tokens of one request."""
        return self._costs.of(tokens) * self._correction_of(tokens) * self._slowness

    def _batch_correction_of(self, batch_size: int) -> float:
        """Return the measured correction; before, assume that drafting gains as much from batching as plain steps."""
        if batch_size == 1:
            return 1.0
        known = self._batch_correction.get(batch_size)
        return known or self._plain_steps[batch_size][0] / (batch_size * self.verify_s(1) + self._host_s)

    def _correction_of(self, tokens: float) -> float:
        """Return the measured correction of the nearest size."""
        if tokens == 1 or not self._correction:
            return 1.0
        known = self._correction.get(tokens)
        return known or self._correction[min(self._correction, key=lambda size: abs(size - tokens))]

    def choose(self, acceptance: Acceptance, cost: DraftCost, limit: int, *, trying: bool = False) -> DraftLength:
        """Choose a length, 0 if drafting does not pay. `trying`: draft anyway if the loss budget allows it."""
        plain = self.plain_step_s()
        best = DraftLength(0, 0.0)
        for count in self._lengths(limit):
            accepted = acceptance.expected(count)
            seconds = self._drafted_s(count, accepted, cost)
            speed_up = (1.0 + accepted) * plain / seconds
            if speed_up > best.speed_up:
                best = DraftLength(count, speed_up, seconds - plain)
        is_wanted = (trying or best.pays) and self.affords(best.loss_s, pays=best.pays)
        return best if is_wanted else best._replace(tokens=0)

    def _lengths(self, limit: int) -> range:
        """The numbers of proposed tokens that memory was admitted for, up to `limit`."""
        rows = verified_rows(self._batch_size) // max(1, self._batch_size)
        return range(1, min(limit, self._costs.most - 1, rows - 1) + 1)

    def _drafted_s(self, count: int, accepted: float, cost: DraftCost) -> float:
        """Seconds of a step that drafts and verifies `count` tokens for each request, of which `accepted` are right."""
        computed = count + 1 + (accepted if self._replays else 0.0)
        own_s = self.verify_s(computed) + cost.draft_s(count)
        return self._batch_correction_of(self._batch_size) * (own_s * self._batch_size + self._host_s)

    @staticmethod
    def pays(speed_up: float) -> bool:
        return speed_up > _MIN_SPEED_UP

    @property
    def is_due_plain(self) -> bool:
        """True if the next step must be plain, to measure plain steps."""
        if self._since_plain >= _PLAIN_EVERY:
            return True
        return self._batch_size > 1 and self._plain_steps.get(self._batch_size, (0.0, 0))[1] < _FIRST_PLAIN

    def announce(self, drafting_s: float, invested_s: float = 0.0, *, pays: bool = True) -> None:
        """Report the seconds that the next step spends on drafting, and whether the proposal promises to pay.

        `invested_s` is spent in addition for later steps, so this step need not earn it back.
        """
        self._drafting_s += drafting_s + invested_s
        self._gained_s += invested_s
        self._is_try = self._is_try and not pays

    def affords(self, seconds: float, *, pays: bool = True) -> bool:
        return seconds <= self._allowed_s(pays)

    def steps_until_affordable(self, seconds: float, *, pays: bool) -> float:
        """Return after how many steps a loss of `seconds` is allowed, unless drafting gains anything."""
        return max(0.0, seconds - self._allowed_s(pays)) / (ALLOWED_LOSS * self.plain_step_s())

    def _allowed_s(self, pays: bool) -> float:
        return self._loss_budget_s + (self._gained_s if pays else 0.0)

    def skips_plain_step(self) -> bool:
        """Return True if a plain step of one request need not be reported; the next report counts for it too."""
        if self._since_plain or self._skipped + 1 >= _LEARN_EVERY:
            return False
        self._skipped += 1
        return True

    def end(self, step: DraftStep) -> None:
        """Learn from a step; skipped steps count as equal to it."""
        batch_size = len(step.chunks)
        if step.prefill or not batch_size:
            return
        drafted, weight = max(step.chunks) > 1, 1
        if batch_size == 1 and not drafted:
            weight, self._skipped = 1 + self._skipped, 0
        self.steps += weight
        self.tokens += weight * step.tokens
        self.drafted_steps += drafted
        self._since_plain = self._since_plain + 1 if drafted else 0
        self._batch_size = batch_size
        if batch_size == 1:
            self._learn_single(step.chunks[0], step.engine_s, step.total_s - step.engine_s)
        elif not self._learn_batch(step, batch_size, drafted):
            return
        self._account(step, batch_size, drafted, weight)

    def _account(self, step: DraftStep, batch_size: int, drafted: bool, weight: int) -> None:
        """Count the gain or loss of `weight` steps like this one against plain steps."""
        spent_s = plain_s = weight * step.total_s
        most_s = _MAX_BUDGET * self.plain_step_s()
        if drafted:
            plain_s = step.tokens / batch_size * self.plain_step_s()
            # A step that another program delayed must not count against drafting.
            expected_s = sum(map(self.verify_s, step.chunks)) + self._drafting_s + self._host_s
            gained_s = plain_s - min(step.total_s, 2.0 * expected_s)
            # The loss budget pays for tries, and for losses beyond what was gained.
            kept_s = 0.0 if self._is_try and gained_s < 0 else max(gained_s, -self._gained_s)
            self._gained_s = min(self._gained_s + kept_s, most_s)
            self._loss_budget_s += gained_s - kept_s
        self._loss_budget_s = min(self._loss_budget_s + ALLOWED_LOSS * spent_s, most_s)
        self.plain_s += plain_s
        self.spent_s += spent_s

    def _learn_single(self, tokens: int, engine_s: float, host_s: float) -> None:
        """Learn the machine's speed, mainly from plain steps, and the cost corrections from drafting steps."""
        known, one = self._slowness, self._costs.one
        if tokens == 1:
            self._slowness = known = known + 2 * _NEW_SHARE * (min(engine_s / one, _OUTLIER * known) - known)
            self._host_s += _NEW_SHARE * (min(host_s, one * known) - self._host_s)
            return
        correction, calibrated = self._correction_of(tokens), self._costs.of(tokens)
        measured = min(max(engine_s / (calibrated * known), correction / _OUTLIER), correction * _OUTLIER)
        self._correction[tokens] = correction + _NEW_SHARE * (measured - correction)
        self._slowness += 0.02 * (min(engine_s / (calibrated * correction), _OUTLIER * known) - known)

    def _learn_batch(self, step: DraftStep, batch_size: int, drafted: bool) -> bool:
        """Learn from a step of several requests; return False if no plain step of this size was measured yet."""
        if not drafted:
            mean = self._plain_steps.setdefault(batch_size, [step.total_s, 0])
            mean[0] += _NEW_SHARE * (min(step.total_s, _OUTLIER * mean[0]) - mean[0])
            mean[1] += 1
        elif batch_size in self._plain_steps:
            predicted = sum(map(self.verify_s, step.chunks)) + step.total_s - step.engine_s
            correction = self._batch_correction_of(batch_size)
            self._batch_correction[batch_size] = correction + 3 * _NEW_SHARE * (
                min(step.total_s / predicted, _OUTLIER * correction) - correction
            )
        return batch_size in self._plain_steps


def longer_backoff(steps: int) -> int:
    """Return the length of the next backoff, after a try that did not pay."""
    return min(2 * steps, LONGEST_BACKOFF)
