"""Drafting adapts: near the best fixed length where it pays, and never more than its budget lost where it does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.contracts.memory import LONE_VERIFIED_ROWS, verified_rows
from edgekit.runtime.generation.sampling import Sampler, Sampling
from edgekit.runtime.speculation.controller import (
    Acceptance,
    AdaptingDrafter,
    DraftStats,
    SpeculationController,
    StepTimes,
)
from edgekit.runtime.speculation.costs import Costs
from edgekit.runtime.speculation.draft_method import DraftRequest
from edgekit.runtime.speculation.hidden_log import HiddenLog

# What verifying k tokens costs, in steps: kernels that are limited by memory, by arithmetic, and in between.
CHEAP = {1: 1.0, 2: 1.05, 3: 1.1, 4: 1.15, 5: 1.2, 6: 1.25, 7: 1.3, 8: 1.35, 9: 1.4, 16: 2.0}
USUAL = {1: 1.0, 2: 1.3, 3: 1.55, 4: 1.65, 5: 2.1, 6: 2.2, 7: 2.6, 8: 2.8, 9: 3.2, 16: 4.5}
DEAR = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0, 6: 6.0, 7: 7.0, 8: 8.0, 9: 9.0, 16: 16.0}
HOST = 0.01
WRONG = 2  # the token that nobody proposes
FIRST_LOSS, LOSS = 5.0, 0.003  # the budget: plain steps at first, and a share of the time
CLOCK = [0.0]


@pytest.fixture(autouse=True)
def _counted_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgekit.runtime.speculation.controller.perf_counter", lambda: CLOCK[0])


class Proposes:
    """Proposes its kind's token, as a drafter or a look-up."""

    match_length = 0

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        self.kind.asked.append(len(history))
        CLOCK[0] += self.catch_up_s(history) + self.kind.draft_s(limit)
        return [self.kind.token] * limit if len(history) % self.kind.every == 0 else ()

    def catch_up_s(self, history: Sequence[int]) -> float:
        return self.kind.reading_s if len(history) == 10 else 0.0

    def observe(self, accepted: Sequence[int]) -> None: ...
    def close(self) -> None: ...


class Kind:
    """A draft method with known costs. `every`: proposes something in one of so many places."""

    name = "known"
    bytes = 0
    reads_hidden = False

    def __init__(self, token_s: float, *, reading_s: float = 0.0, token: int = 1, every: int = 1) -> None:
        self.token_s, self.tokens, self.reading_s, self.token, self.every = token_s, 8, reading_s, token, every
        self.asked: list[int] = []

    def start(self, request: DraftRequest) -> Proposes:
        return Proposes(self)

    def draft_s(self, tokens: int) -> float:
        return self.token_s * tokens

    def close(self) -> None: ...


LOOKUP_S = 1e-5
NEVER = 10**9


class Simulated:
    """Requests on one counted clock, on which a plain step takes one second."""

    def __init__(self, true: dict[int, float], *kinds: Kind, calibrated: dict[int, float] | None = None) -> None:
        self.true = Costs(true)
        self.controller = SpeculationController(Costs(calibrated or true))
        self.stats = [DraftStats(kind, self.controller.times) for kind in kinds]
        self.chance = random.Random(0)
        self.noise: Callable[[random.Random], float] = lambda chance: 1.0
        self.rates: dict[int, float] = {}  # of tokens that are right more rarely than others
        self.spent = self.plain = 0.0  # measured, and what plain decoding would have taken

    def start(self, last: int = 100_000, hidden: HiddenLog | None = None) -> AdaptingDrafter:
        request = DraftRequest([0], Sampler(Sampling(), 16), KVEvictionPolicy(), last, lambda: None, hidden=hidden)
        return AdaptingDrafter(request, self.stats, self.controller)

    def step(self, drafter: AdaptingDrafter, history: list[int], rate: float) -> Sequence[int]:
        """Advance one request, whose proposed tokens are right with the chance `rate`; return what it proposed."""
        self.controller.begin(1)
        before = CLOCK[0]
        proposal = drafter.propose(history, 8)
        drafting = CLOCK[0] - before
        right, rate = 0, self.rates.get(proposal[0], rate) if proposal else rate
        while right < len(proposal) and self.chance.random() < rate:
            right += 1
        accepted = [*proposal[:right], WRONG]
        drafter.observe(accepted)
        seconds = (self.true.of(len(proposal) + 1) + HOST) * self.noise(self.chance) + drafting
        self.controller.end(1, len(proposal) + 1, len(accepted), seconds)
        history += accepted
        self.spent += seconds
        self.plain += len(accepted) * (1 + HOST)
        return proposal

    def answer(self, tokens: int, rate: float | Callable[[int], float], last: int = 100_000) -> int:
        """Write an answer; return how many of its steps drafted."""
        drafter, history, drafted = self.start(last), [0] * 10, 0
        while len(history) < 10 + tokens:
            chance = rate if isinstance(rate, float) else rate(len(history) - 10)
            drafted += bool(self.step(drafter, history, chance))
        return drafted

    @property
    def speed_up(self) -> float:
        return self.plain / self.spent

    @property
    def lost(self) -> float:
        return self.spent - self.plain


def best_fixed(rate: float, true: dict[int, float], draft: float) -> float:
    cost = Costs(true)
    found = [
        sum(rate**place for place in range(count + 1)) * (1 + HOST) / (cost.of(count + 1) + draft * count + HOST)
        for count in range(9)
    ]
    return max(found)


VERIFYING = {"cheap": CHEAP, "usual": USUAL, "dear": DEAR}


@pytest.mark.parametrize("draft", [1e-4, 0.1, 0.4])
@pytest.mark.parametrize("true", VERIFYING.values(), ids=VERIFYING)
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.45, 0.6, 0.8, 0.95])
def test_controller_approaches_the_best_length_and_never_loses(
    rate: float, true: dict[int, float], draft: float
) -> None:
    run = Simulated(true, Kind(draft))
    run.answer(3000, rate)
    assert run.speed_up >= 0.99
    assert run.speed_up >= 0.93 * best_fixed(rate, true, draft)


@pytest.mark.parametrize("tokens", [24, 48, 200])
@pytest.mark.parametrize("reading", [0.0, 1.2])
@pytest.mark.parametrize("draft", [0.1, 0.5])
def test_a_drafter_that_is_never_right_loses_no_more_than_the_budget(draft: float, reading: float, tokens: int) -> None:
    """After every step, from the first answer on, although nobody knows yet that no proposal is ever right."""
    run, drafted = Simulated(USUAL, Kind(draft, reading_s=reading)), 0
    for _ in range(40):
        drafter, history = run.start(10 + tokens), [0] * 10
        for _ in range(tokens):
            drafted += bool(run.step(drafter, history, 0.0))
            assert run.lost <= FIRST_LOSS + LOSS * run.spent + 0.05
    assert drafted


@pytest.mark.parametrize("seed", range(4))
def test_a_wrong_calibration_costs_no_more_than_two_percent(seed: int) -> None:
    run = Simulated(DEAR, Kind(0.1), calibrated=CHEAP)
    run.chance.seed(seed)
    run.answer(3000, 0.5)
    assert run.speed_up >= 0.98
    run = Simulated(CHEAP, Kind(0.02), calibrated=USUAL)
    run.chance.seed(seed)
    run.answer(3000, 0.9)
    assert run.speed_up >= 0.85 * best_fixed(0.9, CHEAP, 0.02)


def test_busy_machine_does_not_turn_drafting_off_for_good() -> None:
    def bursts(chance: random.Random) -> float:
        return 20.0 if chance.random() < 0.02 else chance.uniform(0.9, 1.6)

    quiet, busy, plain = (Simulated(USUAL, Kind(0.1)), Simulated(USUAL, Kind(0.1)), Simulated(DEAR, Kind(0.1)))
    busy.noise = plain.noise = bursts
    quiet.answer(6000, 0.8)
    busy.answer(6000, 0.8)
    plain.answer(6000, 0.0)
    assert busy.controller.drafted_steps > 0.85 * busy.controller.steps
    assert busy.speed_up / plain.speed_up > 0.9 * quiet.speed_up


def test_a_plain_step_is_known_to_slow_down_with_the_machine_while_every_step_drafts() -> None:
    times = StepTimes(Costs(USUAL))
    for tokens in (1, 2):
        for _ in range(30):
            times.add(1, tokens, USUAL[tokens])
    for _ in range(60):
        times.add(1, 2, 2.0 * USUAL[2])
    assert times.seconds(1, 1) > 1.05
    assert times.seconds(1, 2) == pytest.approx(2.0 * USUAL[2], rel=0.05)


def test_the_budget_is_in_steps_of_the_machine_as_it_is_now() -> None:
    """Calibrated on a quiet machine, and used on one that is four times as slow."""
    run = Simulated({tokens: 4.0 * seconds for tokens, seconds in USUAL.items()}, Kind(0.1), calibrated=USUAL)
    drafter, history = run.start(), [0] * 10
    drafted = [bool(run.step(drafter, history, 0.0)) for _ in range(6)]
    assert drafted == [False] * 3 + [True] * 3


def test_accepted_drafts_that_are_computed_again_are_charged() -> None:
    controller = SpeculationController(Costs(USUAL), replays=True)
    stats = DraftStats(Kind(0.1), controller.times)
    assert controller.choose(stats, stats.acceptance(0), 3).tokens
    for _ in range(3):
        controller.begin(1)
        controller.end(1, 8, 1, USUAL[8])
    assert not controller.choose(stats, stats.acceptance(0), 3).tokens


def test_drafting_follows_the_predictability_of_the_text() -> None:
    run = Simulated(USUAL, Kind(0.05))
    run.answer(6000, lambda place: 0.9 if 2000 <= place < 4000 else 0.05)
    assert run.speed_up >= 0.9 * 6000 / (4000 / 0.99 + 2000 / best_fixed(0.9, USUAL, 0.05))


def test_a_method_that_does_not_pay_sleeps_longer_every_time_until_the_text_changes() -> None:
    run = Simulated(USUAL, kind := Kind(0.1))
    drafter, history = run.start(), [0] * 10
    while len(history) < 1200:
        run.step(drafter, history, 0.0)
    gaps = [later - asked - 1 for asked, later in zip(kind.asked, kind.asked[1:], strict=False) if later > asked + 1]
    assert [gap // 8 * 8 for gap in gaps[:5]] == [8, 16, 32, 64, 128] and min(gaps[5:]) >= 128
    drafted = [bool(run.step(drafter, history, 0.95)) for _ in range(400)]
    assert not any(drafted[:20])
    assert sum(drafted[-100:]) >= 95


def test_a_new_request_tries_again_soon() -> None:
    run = Simulated(USUAL, kind := Kind(0.1))
    run.answer(2000, 0.0)
    kind.asked.clear()
    for _ in range(300):
        run.controller.end(1, 1, 1, 1 + HOST)  # of other requests: the budget grows
    run.answer(60, 0.0)
    assert kind.asked and kind.asked[0] <= 10 + 9


def test_report_has_the_gain() -> None:
    run = Simulated(USUAL, Kind(0.1))
    run.answer(3000, 0.8)
    controller = run.controller
    assert controller.plain_s / controller.spent_s == pytest.approx(run.speed_up, rel=0.03)
    assert controller.latest is not None and controller.latest.pays
    assert controller.latest.speed_up == pytest.approx(best_fixed(0.8, USUAL, 0.1), rel=0.15)


def test_draft_reads_a_long_prompt_only_where_it_can_pay() -> None:
    def first(reading_s: float, last: int, *, gained: float = 0.0) -> Sequence[int]:
        run = Simulated(CHEAP, Kind(0.05, reading_s=reading_s))
        run.stats[0].gained = gained
        for _ in range(3):
            run.controller.end(1, 1, 1, 1.0)
        run.controller.begin(1)
        return run.start(last).propose([0] * 10, 8)

    assert first(0.0, 50) and first(2.0, 300)
    assert not first(2.0, 15), "the answer is too short"
    assert not first(20.0, 1000), "the budget is too small"
    assert first(20.0, 1000, gained=30.0) and not first(20.0, 30, gained=30.0)


def test_the_better_of_two_methods_is_used() -> None:
    run = Simulated(USUAL, Kind(0.1, token=3), Kind(0.1, token=1))
    run.rates = {3: 0.3}
    run.answer(6000, 0.9)
    bad, good = run.stats
    assert good.proposed > 10 * bad.proposed


def test_each_method_backs_off_alone() -> None:
    """Prompt lookup goes on looking while a drafter that does not pay sleeps."""
    lookup, dear = Kind(LOOKUP_S, every=NEVER), Kind(0.9, token=3)
    run = Simulated(DEAR, lookup, dear)
    drafter, history = run.start(), [0] * 10
    for _ in range(50):
        run.step(drafter, history, 0.0)
    assert lookup.asked == list(range(13, 60))
    assert len(dear.asked) < 10


def test_a_method_that_does_not_pay_spends_little_of_what_another_gains() -> None:
    """Prompt lookup is right at times and gains much; the other is never right and costs nearly two steps a try."""

    def speed_up(*kinds: Kind) -> float:
        run = Simulated(USUAL, *kinds)
        run.rates = {3: 0.0}
        for _ in range(30):
            run.answer(200, 0.7)
        return run.speed_up

    alone = speed_up(Kind(LOOKUP_S, every=4))
    both = speed_up(Kind(LOOKUP_S, every=4), dear := Kind(1.8, token=3))
    assert alone > 1.05 and both > alone - 0.03
    assert dear.asked


def test_drafting_that_proposes_nothing_is_charged() -> None:
    run = Simulated(USUAL, kind := Kind(0.5, every=NEVER))
    run.answer(2000, 0.0)
    assert kind.asked and run.lost <= FIRST_LOSS + LOSS * run.spent + 0.05


def test_no_hidden_states_are_asked_for_while_their_reader_sleeps() -> None:
    hidden, reader = HiddenLog(4), Kind(0.9)
    hidden.most_tokens, reader.reads_hidden = 100, True
    run = Simulated(DEAR, Kind(LOOKUP_S, every=NEVER), reader)
    drafter, history, wanted = run.start(hidden=hidden), [0] * 10, list[int]()
    for _ in range(600):
        if hidden.ask(1, len(history)) is not None:  # of the step before
            wanted.append(len(history))
        run.step(drafter, history, 0.0)
    assert set(reader.asked) <= set(wanted) and len(wanted) < 30


@pytest.mark.parametrize(("together", "pays"), [(1.1, False), (4.0, True)])
def test_batches_are_timed_before_they_draft(together: float, pays: bool) -> None:
    """`together`: what four sequences take in one plain step."""
    controller, costs = SpeculationController(Costs(CHEAP)), Costs(CHEAP)
    stats = DraftStats(Kind(0.01), controller.times)
    request = DraftRequest([0], Sampler(Sampling(), 16), KVEvictionPolicy(), 100_000, lambda: None)
    drafters = [AdaptingDrafter(request, [stats], controller) for _ in range(4)]
    drafted, history, lost = 0, [0] * 10, 0.0
    for step in range(600):
        controller.begin(4)
        before = CLOCK[0]
        proposals = [drafter.propose(history, 8) for drafter in drafters]
        assert step >= 3 or not any(proposals)
        drafted += any(proposals)
        for drafter, proposal in zip(drafters, proposals, strict=True):
            drafter.observe([*proposal, WRONG])
        rows = [len(proposal) + 1 for proposal in proposals]
        seconds = (sum(map(costs.of, rows)) if any(proposals) else together) + CLOCK[0] - before
        controller.end(4, sum(rows), sum(rows), seconds)
        lost += seconds - together * sum(rows) / 4
        history += [WRONG] * (sum(rows) // 4)
    assert (drafted > 500) == pays
    assert pays or lost <= FIRST_LOSS * 4


@pytest.mark.parametrize("company", [1, 2, 3, 4, 9])
def test_verified_tokens_stay_within_the_admitted_memory(company: int) -> None:
    controller, sure = SpeculationController(Costs({1: 1.0, LONE_VERIFIED_ROWS: 1.0})), Acceptance()
    sure.value = 1.0
    controller.begin(company)
    tokens = controller.choose(DraftStats(Kind(0.0), controller.times), sure, 100).tokens
    assert tokens == {1: 15, 2: 7, 3: 4, 4: 3, 9: 2}[company]
    assert company * (tokens + 1) <= verified_rows(company)


@pytest.mark.parametrize(("step_s", "asked"), [(0.1, 57), (6e-3, 29), (1e-3, 5)])
def test_fruitless_lookups_cost_a_small_share_of_a_step(step_s: float, asked: int) -> None:
    lookup = Kind(29e-6, every=NEVER)
    controller = SpeculationController(Costs({1: step_s, 2: 1.5 * step_s}))
    request = DraftRequest([0], Sampler(Sampling(), 16), KVEvictionPolicy(), 1000, lambda: None)
    drafter = AdaptingDrafter(request, [DraftStats(lookup, controller.times)], controller)
    for length in range(10, 70):
        controller.begin(1)
        assert not drafter.propose([0] * length, 8)
        controller.end(1, 1, 1, step_s)
    assert len(lookup.asked) == asked


def test_acceptance_is_the_average_of_what_was_verified() -> None:
    found = Acceptance()
    for _ in range(300):
        found.add_proposal(1, 4)  # one is right, one is wrong, and two were not verified
    assert found.value == pytest.approx(0.5, abs=0.02)
    found.add_proposal(4, 4)
    assert 0.5 < found.value < 0.6
    found.forget()
    found.add_proposal(4, 4)
    assert found.value > 0.7, "after a sleep, new trials count more"


def test_costs_are_interpolated_between_measured_sizes() -> None:
    costs = Costs({1: 1.0, 2: 0.9, 4: 2.0, 8: 4.0})
    assert [costs.of(rows) for rows in (1, 2, 3, 4, 6, 8)] == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0]
    assert costs.of(15) == pytest.approx(7.0)
    assert Costs({1: 2.0}).of(3) == 6.0
