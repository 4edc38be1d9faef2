"""Choose in each step which method drafts how many tokens: as many as pay, none where drafting does not pay.

Plain decoding is the reference. A step that verifies drafted tokens generates the right ones and one more. It pays if
it promises more tokens a second than a plain step. Three measurements decide: the time of a step by its tokens, how
often drafted tokens are right, and the time of drafting. A method that does not pay sleeps, longer every
time, and is then tried again. All losses together stay within a budget, so that wrong estimates cost little.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, Protocol

from edgekit.contracts.memory import verified_rows

if TYPE_CHECKING:
    from edgekit.contracts.drafter import Drafter
    from edgekit.runtime.speculation.costs import Costs
    from edgekit.runtime.speculation.draft_method import DraftMethod, DraftRequest, Proposer

_LOSS = 0.003  # share of all decoding time that drafting may lose
_LENT = 0.05  # share of what a method gains that any other may lose
_FIRST_STEPS, _MOST_STEPS = 5.0, 40.0  # plain steps that it may lose at first, and at most
_SLEEP, _LONGEST_SLEEP = 8, 128  # steps
_TRIES = 4  # proposals after a sleep, although they promise nothing
_PLAIN_EVERY = 64  # while drafting pays, one step in this many is plain, so that both sides stay measured
_FIRST_PLAIN = 3  # plain steps before drafting: the machine may be slower than at the calibration
_FIRST_GUESS, _GUESS_TRIALS = 0.65, 3  # the first guess of acceptance, and how many trials it is worth
_LOOKUP_S = 3e-5  # methods that are quicker propose first, and are then judged by their match
_LOOKUP_LOSS = 0.0025  # share of a step that look-ups may cost which find nothing
_OUTLIER = 2.0  # a measured time counts as at most this many times what was expected


class Average:
    """A moving average: of all measurements while they are few, then of about the last 1 / `share`."""

    def __init__(self, guess: float, *, share: float, trials: int = 0) -> None:
        """`trials`: how many measurements the guess is worth."""
        self.value, self.count, self._share = guess, trials, share

    def add(self, measured: float) -> None:
        self.count += 1
        self.value += max(self._share, 1 / self.count) * (measured - self.value)


class Acceptance(Average):
    """How often a drafted token is right, if all before it in its proposal are."""

    def __init__(self) -> None:
        super().__init__(_FIRST_GUESS, share=0.02, trials=_GUESS_TRIALS)

    def add_proposal(self, right: int, proposed: int) -> None:
        """Count a proposal whose first `right` tokens were accepted; they and the first wrong token are trials."""
        for place in range(min(right + 1, proposed)):
            self.add(place < right)

    def forget(self) -> None:
        """Trust old trials less, because the text may have changed since."""
        self.count = min(self.count, _GUESS_TRIALS)


class StepTimes:
    """Seconds of a step by its requests and tokens: as calibrated, corrected by what was measured."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.slowness = Average(1.0, share=0.2)  # measured / calibrated seconds of a plain step of one request
        self._corrections: dict[int, dict[int, Average]] = {}  # by requests, then by tokens of all

    def seconds(self, requests: int, tokens: float) -> float:
        """Expect the seconds of a step that computes `tokens` tokens for each request."""
        return requests * self.costs.of(tokens) * self._correction(requests, tokens) * self.slowness.value

    def num_plain(self, requests: int) -> int:
        """Return how many plain steps were measured."""
        measured = self.slowness if requests == 1 else self._corrections.get(requests, {}).get(requests)
        return measured.count if measured else 0

    def add(self, requests: int, tokens: int, seconds: float) -> None:
        """Learn from a step with `tokens` tokens of all requests."""
        ratio = seconds / self.seconds(requests, tokens / requests)
        correction = self._correction(requests, tokens / requests)
        known = self._corrections.setdefault(requests, {})
        if requests > 1 and tokens not in known:  # what several requests share was not calibrated
            known[tokens] = Average(ratio * correction, share=0.1, trials=1)
            return
        ratio = min(ratio, _OUTLIER) if self.slowness.count else ratio
        if tokens == 1:
            self.slowness.add(ratio * self.slowness.value)
            return
        # Begin like the nearest size: one that a single disturbed step made look dear is not chosen again.
        known.setdefault(tokens, Average(correction, share=0.1, trials=4)).add(ratio * correction)
        # The machine's speed changes while all steps draft; the average of ratios stays what it is.
        self.slowness.value *= 1 + 0.02 * (ratio - 1)

    def _correction(self, requests: int, tokens: float) -> float:
        """Return the measured correction of the nearest number of tokens."""
        known = self._corrections.get(requests)
        if not known or requests == tokens == 1:
            return 1.0
        wanted = requests * tokens
        return known[min(known, key=lambda size: abs(size - wanted))].value


class DraftStats:
    """The measurements of one draft method, over all requests."""

    def __init__(self, method: DraftMethod, times: StepTimes) -> None:
        self.method, self._times = method, times
        self.is_lookup = method.draft_s(1) < _LOOKUP_S
        self.gained = 0.0  # plain steps that the method may lose again, in addition to the budget of all
        self.proposed = 0
        self.right: list[int] = []  # by place in a proposal, for reports
        self.tried: list[int] = []
        self._acceptance: dict[int, Acceptance] = {}
        self._slowness = Average(1.0, share=0.1, trials=1)  # measured / calibrated seconds of drafting

    def acceptance(self, match_length: int) -> Acceptance:
        return self._acceptance.setdefault(match_length, Acceptance())

    def draft_s(self, tokens: int) -> float:
        """Seconds to draft `tokens` tokens now."""
        slowness = 1.0 if self.is_lookup else self._slowness.value * self._times.slowness.value
        return self.method.draft_s(tokens) * slowness

    def add_time(self, tokens: int, seconds: float) -> None:
        expected = self.draft_s(tokens)
        if tokens and expected and not self.is_lookup:
            self._slowness.add(self._slowness.value * min(seconds / expected, _OUTLIER))

    def add_verified(self, right: int, proposed: int, match_length: int) -> None:
        """Count a proposal whose first `right` tokens were accepted."""
        self.proposed += proposed
        self.acceptance(match_length).add_proposal(right, proposed)
        for place in range(min(right + 1, proposed)):
            if place == len(self.tried):
                self.right.append(0)
                self.tried.append(0)
            self.right[place] += place < right
            self.tried[place] += 1


class DraftLength(NamedTuple):
    """How many tokens to propose, 0 if a loss could not be afforded, and the speed-up that any number promises."""

    tokens: int
    speed_up: float

    @property
    def pays(self) -> bool:
        return self.speed_up > 1.0


class SpeculationController:
    """The measured steps and the budget of all requests of one runtime. The scheduler reports each step."""

    def __init__(self, costs: Costs, *, replays: bool = False) -> None:
        """`replays`: accepted drafts are computed again in the next step, for a recurrent part."""
        self.times, self._replays = StepTimes(costs), replays
        self._requests = 1  # that decode in this step
        self._since_plain = 0
        self._drafting: list[DraftStats] = []  # of the proposals in this step
        self._drafting_s = 0.0
        self._budget = _FIRST_STEPS  # in plain steps, because the speed of the machine changes
        self.plain_s = self.spent_s = 0.0  # all decoding steps: predicted without drafting, and measured
        self.steps = self.drafted_steps = self.tokens = 0
        self.latest: DraftLength | None = None  # the latest decision

    def begin(self, requests: int) -> None:
        """Start a step in which `requests` requests decode."""
        self._requests, self._drafting_s = requests, 0.0
        self._drafting.clear()

    @property
    def is_due_plain(self) -> bool:
        """True if this step must be plain, to measure plain steps."""
        return self._since_plain >= _PLAIN_EVERY or self.times.num_plain(self._requests) < _FIRST_PLAIN

    def plain_step_s(self, requests: int | None = None) -> float:
        return self.times.seconds(requests or self._requests, 1)

    def choose(self, stats: DraftStats, acceptance: Acceptance, limit: int, read_s: float = 0.0) -> DraftLength:
        """Choose the number of tokens that promises most, among those whose loss is affordable after `read_s`."""
        requests, plain_s = self._requests, self.plain_step_s()
        affordable_s = plain_s * (1.0 + self._budget + stats.gained) - read_s
        rows = verified_rows(requests) // max(1, requests)  # for which memory was admitted
        tokens, best, promised = 0, 0.0, 0.0
        chance, accepted = 1.0, 0.0
        for count in range(1, min(limit, self.times.costs.most - 1, rows - 1) + 1):
            chance *= acceptance.value
            accepted += chance
            computed = count + 1 + (accepted if self._replays else 0.0)
            step_s = self.times.seconds(requests, computed) + requests * stats.draft_s(count)
            speed_up = (1.0 + accepted) * plain_s / step_s
            promised = max(promised, speed_up)
            if speed_up > best and step_s <= affordable_s:
                tokens, best = count, speed_up
        return DraftLength(tokens, promised)

    def announce(self, stats: DraftStats, seconds: float = 0.0) -> None:
        """Report a proposal for this step, and the seconds that drafting it took."""
        self._drafting.append(stats)
        self._drafting_s += seconds

    def end(self, requests: int, computed: int, generated: int, seconds: float) -> None:
        """Learn from a step. `computed` and `generated`: tokens of all its requests."""
        is_drafted = computed > requests
        self.times.add(requests, computed, seconds - self._drafting_s)
        plain_s = seconds
        if is_drafted or self._drafting_s:
            plain_s = generated / requests * self.plain_step_s(requests)
            # As expected, not as measured: a step that another program delayed must not count against drafting.
            expected_s = self.times.seconds(requests, computed / requests) + self._drafting_s
            self._settle((plain_s - expected_s) / self.plain_step_s(requests))
        self._budget = min(self._budget + _LOSS * seconds / self.plain_step_s(requests), _MOST_STEPS)
        self._since_plain = self._since_plain + 1 if is_drafted else 0
        self.steps += 1
        self.drafted_steps += is_drafted
        self.tokens += generated
        self.plain_s += plain_s
        self.spent_s += seconds

    def _settle(self, gained: float) -> None:
        """Credit the methods of this step with its gain, in plain steps. A loss takes that, and then the budget of all.

        So a method that never pays cannot spend what another one gains, but for the share that is lent to the budget.
        """
        if not self._drafting:  # accepted drafts were computed again
            self._budget += min(0.0, gained)
            return
        share = gained / len(self._drafting)
        for stats in self._drafting:
            kept = (1 - _LENT) * share if share > 0 else max(share, -stats.gained)
            stats.gained = min(stats.gained + kept, _MOST_STEPS)
            self._budget += share - kept


class _Backoff:
    """When one kind of proposal is asked for next in one request."""

    def __init__(self) -> None:
        self.asleep_until = 0  # length of the text
        self.tries = 0  # proposals that are left, although they do not promise to pay
        self._sleep = _SLEEP

    def count(self, length: int, *, pays: bool) -> None:
        """Count a proposal for a text of `length` tokens. One that pays ends the tries; after the last try, sleep."""
        if pays:
            self._sleep, self.tries = _SLEEP, 0
        else:
            self.tries -= 1
            if self.tries == 0:
                self.sleep(length)

    def sleep(self, length: int, *, longer: bool = True) -> None:
        """Sleep from the next step on, and the next time twice as long; then try."""
        self.asleep_until, self.tries = length + 1 + self._sleep, _TRIES
        self._sleep = min(2 * self._sleep, _LONGEST_SLEEP) if longer else _SLEEP


class _MethodInRequest:
    """A draft method in one request."""

    def __init__(self, stats: DraftStats, request: DraftRequest) -> None:
        self.stats = stats
        self.proposer: Proposer = stats.method.start(request)
        self.asleep_until = 0  # length of the text
        self._backoffs: dict[int, _Backoff] = {}

    def backoff(self, match_length: int) -> _Backoff:
        return self._backoffs.setdefault(match_length, _Backoff())


class _Offer(NamedTuple):
    """What a method would propose."""

    method: _MethodInRequest
    length: DraftLength
    match_length: int
    ready: Sequence[int]  # the proposal of a look-up
    read_s: float  # seconds to process text before drafting


class AdaptingDrafter:
    """Asks in each step of one request the method that promises most, or none."""

    def __init__(self, request: DraftRequest, stats: Sequence[DraftStats], controller: SpeculationController) -> None:
        self._request, self._controller = request, controller
        self._methods = [_MethodInRequest(each, request) for each in stats]
        self._asleep_until = 0  # length of the text
        self._pending: tuple[_Offer, Sequence[int]] | None = None

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        self._pending, length = None, len(history)
        if length < self._asleep_until or self._controller.is_due_plain:
            return ()
        awake = [each for each in self._methods if each.asleep_until <= length]
        offers = [offer for each in awake if (offer := self._offer(each, history, limit))]
        proposal = self._draft(max(offers, key=lambda offer: offer.length.speed_up), history) if offers else ()
        self._asleep_until = min(each.asleep_until for each in self._methods)
        if self._request.hidden is not None:
            readers = [each.asleep_until for each in self._methods if each.stats.method.reads_hidden]
            self._request.hidden.read_from = min(readers, default=0)
        return proposal

    def observe(self, accepted: Sequence[int]) -> None:
        if self._pending is None:
            return
        offer, proposal = self._pending
        right = 0
        for guess, token in zip(proposal, accepted, strict=False):
            if guess != token:
                break
            right += 1
        offer.method.stats.add_verified(right, len(proposal), offer.match_length)

    def close(self) -> None:
        for each in self._methods:
            each.proposer.close()

    def _offer(self, method: _MethodInRequest, history: Sequence[int], limit: int) -> _Offer | None:
        """Return what the method would propose if that pays or may be tried; else it sleeps."""
        stats, proposer, length = method.stats, method.proposer, len(history)
        limit, match_length, read_s = min(limit, stats.method.tokens), 0, 0.0
        ready: Sequence[int] = ()
        if stats.is_lookup:
            ready = proposer.propose(history, limit)
            limit, match_length = len(ready), proposer.match_length
        else:
            read_s = proposer.catch_up_s(history) * self._controller.times.slowness.value
        backoff = method.backoff(match_length)
        if limit and backoff.asleep_until <= length:
            if backoff.tries:
                stats.acceptance(match_length).forget()
            chosen = self._controller.choose(stats, stats.acceptance(match_length), limit, read_s)
            self._controller.latest = chosen
            if chosen.tokens and (backoff.tries or (chosen.pays and self._is_worth_reading(chosen, length, read_s))):
                return _Offer(method, chosen, match_length, ready, read_s)
            backoff.sleep(length, longer=not chosen.pays)  # one that pays waits only for the budget, or a next request
        method.asleep_until = backoff.asleep_until
        if stats.is_lookup:
            # With a small model the look-up itself takes a measurable share of each step: skip some steps.
            skipped = stats.method.draft_s(1) / (_LOOKUP_LOSS * self._controller.plain_step_s())
            method.asleep_until = length + 1 + int(skipped)
        return None

    def _is_worth_reading(self, chosen: DraftLength, length: int, read_s: float) -> bool:
        """Return True if the rest of the answer can gain what reading the text for the drafter takes."""
        gain_s = (self._request.max_length - length) * self._controller.plain_step_s() * (1 - 1 / chosen.speed_up)
        return gain_s >= 2.0 * read_s  # the answer may end early

    def _draft(self, offer: _Offer, history: Sequence[int]) -> Sequence[int]:
        """Return the proposal of an offer."""
        method, stats, tokens = offer.method, offer.method.stats, offer.length.tokens
        backoff = method.backoff(offer.match_length)
        backoff.count(len(history), pays=offer.length.pays)
        self._controller.latest = offer.length
        proposal, seconds = offer.ready[:tokens], 0.0
        if not stats.is_lookup:
            method.asleep_until = backoff.asleep_until
            started = perf_counter()
            proposal = method.proposer.propose(history, tokens)
            seconds = perf_counter() - started
            if not offer.read_s:
                stats.add_time(len(proposal), seconds)
        self._controller.announce(stats, seconds)
        self._pending = offer, proposal
        return proposal


class DrafterFactory(Protocol):
    """Makes one drafter for each request. Making one must not use an engine."""

    @property
    def tokens(self) -> int:
        """The most tokens of a proposal."""

    @property
    def controller(self) -> SpeculationController | None:
        """The controller of adaptive drafters; None: always draft, up to `tokens`."""

    def start(self, request: DraftRequest) -> Drafter: ...

    def close(self) -> None: ...
