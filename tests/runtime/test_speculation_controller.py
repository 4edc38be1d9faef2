"""Drafting adapts: near the best fixed length where it pays, and never more than 2 % lost where it does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.planner.memory import LONE_VERIFIED_ROWS, verified_rows
from edgekit.runtime.generation.sampling import Sampler, Sampling
from edgekit.runtime.speculation.acceptance import Acceptance
from edgekit.runtime.speculation.adaptive import AdaptingDrafter
from edgekit.runtime.speculation.controller import DraftLength, DraftStep, SpeculationController
from edgekit.runtime.speculation.costs import Costs
from edgekit.runtime.speculation.draft_method import DraftStats
from edgekit.runtime.speculation.drafters import DraftRequest
from edgekit.runtime.speculation.hidden_log import HiddenLog

# What verifying k tokens costs, in steps: kernels that are limited by memory, by arithmetic, and in between.
CHEAP = {1: 1.0, 2: 1.05, 3: 1.1, 4: 1.15, 5: 1.2, 6: 1.25, 7: 1.3, 8: 1.35, 9: 1.4, 16: 2.0}
USUAL = {1: 1.0, 2: 1.3, 3: 1.55, 4: 1.65, 5: 2.1, 6: 2.2, 7: 2.6, 8: 2.8, 9: 3.2, 16: 4.5}
DEAR = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0, 6: 6.0, 7: 7.0, 8: 8.0, 9: 9.0, 16: 16.0}
HOST = 0.01
Rate = Callable[[int], float]
CLOCK = [0.0]


@pytest.fixture(autouse=True)
def _counted_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgekit.runtime.speculation.adaptive.perf_counter", lambda: CLOCK[0])


class Proposes:
    """A drafter with a known acceptance rate."""

    match_length = 0

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        CLOCK[0] += self.catch_up_s(history) + self.kind.draft_s(limit)
        return [self.kind.token] * limit

    def catch_up_s(self, history: Sequence[int]) -> float:
        return self.kind.reading_s if len(history) == 10 else 0.0

    def observe(self, accepted: Sequence[int]) -> None: ...
    def close(self) -> None: ...


class Silent(Proposes):
    """A look-up that finds nothing."""

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        return ()


class Sometimes(Proposes):
    """A look-up that finds something in every fourth place."""

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        return [self.kind.token] * limit if len(history) % 4 == 0 else ()


class Kind:
    name = "known"
    bytes = 0
    reads_hidden = False

    def __init__(self, token_s: float, tokens: int = 8, reading_s: float = 0.0, token: int = 1) -> None:
        self.token_s, self.tokens, self.reading_s, self.token = token_s, tokens, reading_s, token

    def start(self, request: DraftRequest) -> Proposes:
        return Proposes(self)

    def draft_s(self, tokens: int) -> float:
        return self.token_s * tokens

    def close(self) -> None: ...


def request(last: int = 100_000) -> DraftRequest:
    return DraftRequest([0], Sampler(Sampling(), 16), KVEvictionPolicy(), last, lambda: None)


def decode(
    rate: Rate,
    true: dict[int, float],
    draft: float,
    *,
    tokens: int = 3000,
    calibrated: dict[int, float] | None = None,
    noise: Callable[[random.Random], float] = lambda chance: 1.0,
    seed: int = 0,
) -> tuple[float, SpeculationController]:
    """Speed against plain decoding, on a clock that is only counted; one plain step takes one second."""
    chance, controller, truth = random.Random(seed), SpeculationController(Costs(calibrated or true)), Costs(true)
    records = [DraftStats(Kind(max(draft, 1e-4)), controller)]
    drafter: AdaptingDrafter = AdaptingDrafter(request(), records, controller)
    spent, done, history = 0.0, 0, [0] * 10
    while done < tokens:
        controller.begin(1)
        proposal = drafter.propose(history, 8)
        right = 0
        while right < len(proposal) and chance.random() < rate(done):
            right += 1
        accepted = [1] * right + [2] * (right < len(proposal) or not proposal) or [2]
        if right == len(proposal):
            accepted = [1] * right + [2]
        engine = truth.of(len(proposal) + 1) * noise(chance)
        host = (HOST + draft * len(proposal)) * noise(chance)
        drafter.observe(accepted)
        if proposal or not controller.skips_plain_step():
            controller.end(DraftStep((len(proposal) + 1,), False, len(accepted), engine, engine + host))
        history += accepted
        spent += engine + host
        done += len(accepted)
    return done * (1 + HOST) / spent, controller


def best_fixed(rate: float, true: dict[int, float], draft: float) -> float:
    cost = Costs(true)
    found = [
        sum(rate**place for place in range(count + 1)) * (1 + HOST) / (cost.of(count + 1) + draft * count + HOST)
        for count in range(9)
    ]
    return max(found)


RATES = (0.0, 0.2, 0.45, 0.6, 0.8, 0.95)
VERIFYING = {"cheap": CHEAP, "usual": USUAL, "dear": DEAR}


@pytest.mark.parametrize("draft", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("true", VERIFYING.values(), ids=VERIFYING)
@pytest.mark.parametrize("rate", RATES)
def test_controller_approaches_the_best_length_and_never_loses(
    rate: float, true: dict[int, float], draft: float
) -> None:
    speed, _ = decode(lambda place: rate, true, draft)
    assert speed >= 0.98
    assert speed >= 0.9 * best_fixed(rate, true, draft)


@pytest.mark.parametrize("seed", range(4))
def test_a_wrong_calibration_costs_no_more_than_two_percent(seed: int) -> None:
    speed, _ = decode(lambda place: 0.5, DEAR, 0.1, calibrated=CHEAP, seed=seed)
    assert speed >= 0.98
    speed, _ = decode(lambda place: 0.9, CHEAP, 0.02, calibrated=USUAL, seed=seed)
    assert speed >= 0.65 * best_fixed(0.9, CHEAP, 0.02)


def test_busy_machine_does_not_turn_drafting_off_for_good() -> None:
    def bursts(chance: random.Random) -> float:
        return 20.0 if chance.random() < 0.02 else chance.uniform(0.9, 1.6)

    quiet, _ = decode(lambda place: 0.8, USUAL, 0.1)
    busy, controller = decode(lambda place: 0.8, USUAL, 0.1, noise=bursts, tokens=6000)
    assert controller.drafted_steps > 0.7 * controller.steps
    plain, _ = decode(lambda place: 0.0, DEAR, 0.0, noise=bursts, tokens=6000)
    assert busy / plain > 0.8 * quiet


def test_drafting_follows_the_predictability_of_the_text() -> None:
    speed, controller = decode(lambda place: 0.9 if 2000 <= place < 4000 else 0.05, USUAL, 0.05, tokens=6000)
    gain = best_fixed(0.9, USUAL, 0.05)
    assert speed >= 0.9 * 6000 / (4000 / 0.98 + 2000 / gain)
    assert controller.drafted_steps > 100


def test_report_has_the_gain() -> None:
    speed, controller = decode(lambda place: 0.8, USUAL, 0.1)
    assert controller.plain_s / controller.spent_s == pytest.approx(speed, rel=0.03)
    assert controller.promised == pytest.approx(best_fixed(0.8, USUAL, 0.1), rel=0.15)


def test_draft_prefills_a_long_prompt_only_where_it_can_pay() -> None:
    def first(reading_s: float, last: int) -> Sequence[int]:
        controller = SpeculationController(Costs(CHEAP))
        controller.begin(1)
        kind = Kind(0.05, reading_s=reading_s)
        return AdaptingDrafter(request(last), [DraftStats(kind, controller)], controller).propose([0] * 10, 8)

    def later(reading_s: float, last: int) -> Sequence[int]:
        """The same once other requests have shown that drafts are accepted."""
        controller = SpeculationController(Costs(CHEAP))
        controller.begin(1)
        record = DraftStats(Kind(0.05, reading_s=reading_s), controller)
        for _ in range(8):
            record.acceptance(0).observe(3, 4)
        return AdaptingDrafter(request(last), [record], controller).propose([0] * 10, 8)

    assert later(20.0, 1000) and not later(20.0, 30) and not later(500.0, 100_000)
    assert first(0.0, 50) and first(2.0, 300)
    assert not first(2.0, 20) and not first(20.0, 100_000)  # no draft was accepted yet, so a gain is only a guess


@pytest.mark.parametrize("tokens", [24, 48, 200])
@pytest.mark.parametrize("reading", [0.0, 1.2])
@pytest.mark.parametrize("draft", [0.1, 0.5])
def test_short_answers_never_lose_more_than_two_percent(draft: float, reading: float, tokens: int) -> None:
    """From the first answer on, although nobody knows yet that no proposal is ever right."""
    controller, drafted = SpeculationController(Costs(USUAL)), 0
    records = [DraftStats(Kind(draft, reading_s=reading), controller)]
    spent = done = 0.0
    for _ in range(40):
        drafter = AdaptingDrafter(request(1 + tokens), records, controller)
        history = [0] * 10
        for _ in range(tokens):
            controller.begin(1)
            before = CLOCK[0]
            proposal = drafter.propose(history, 8)
            engine, host = Costs(USUAL).of(len(proposal) + 1), HOST + CLOCK[0] - before
            drafter.observe([2])
            if proposal or not controller.skips_plain_step():
                controller.end(DraftStep((len(proposal) + 1,), False, 1, engine, engine + host))
            history.append(2)
            spent, done, drafted = spent + engine + host, done + 1 + HOST, drafted + bool(proposal)
        assert done / spent >= 0.98
    assert drafted


def test_the_better_of_two_methods_is_used() -> None:
    controller = SpeculationController(Costs(USUAL))
    good, bad = Kind(0.1, token=1), Kind(0.1, token=3)
    records = [DraftStats(bad, controller), DraftStats(good, controller)]
    drafter = AdaptingDrafter(request(), records, controller)
    chance: Any = random.Random(1)
    history = [0] * 10
    for _ in range(2000):
        controller.begin(1)
        proposal = drafter.propose(history, 8)
        before = [record.proposed for record in records]
        rate = 0.3 if 3 in proposal else 0.9
        right = 0
        while right < len(proposal) and chance.random() < rate:
            right += 1
        accepted = [*proposal[:right], 2]
        drafter.observe(accepted)
        assert [record.proposed for record in records] != before or not proposal
        engine = Costs(USUAL).of(len(proposal) + 1)
        controller.end(DraftStep((len(proposal) + 1,), False, len(accepted), engine, engine + 0.1 * len(proposal)))
        history += accepted
    assert records[1].proposed > 10 * records[0].proposed


def test_an_answer_has_few_decisions_while_no_try_can_be_afforded(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = SpeculationController(Costs(DEAR))
    record = DraftStats(Kind(0.9), controller)
    tried, decided, choose = 0, 0, controller.choose

    def counted(*given: Any, **options: Any) -> DraftLength:
        nonlocal decided
        decided += 1
        return choose(*given, **options)

    monkeypatch.setattr(controller, "choose", counted)
    for _ in range(100):
        drafter = AdaptingDrafter(request(110), [record], controller)
        for length in range(10, 110):
            controller.begin(1)
            proposal = drafter.propose([0] * length, 8)
            tried += bool(proposal)
            drafter.observe([2])
            engine = Costs(DEAR).of(len(proposal) + 1)
            controller.end(DraftStep((len(proposal) + 1,), False, 1, engine, engine + HOST + len(proposal) * 0.9))
    assert 100 <= decided <= 160
    assert 10 < tried < 30
    assert 0.99 <= controller.plain_s / controller.spent_s < 1


def test_each_method_backs_off_alone() -> None:
    """Prompt lookup goes on looking while a drafter that does not pay sleeps."""
    controller = SpeculationController(Costs(DEAR))
    lookup, dear = Kind(1e-5, token=1), Kind(0.9, token=3)
    looked = list[int]()

    class Looks(Proposes):
        def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
            looked.append(len(history))
            return ()

    lookup.start = lambda request: Looks(lookup)  # type: ignore[method-assign]
    drafter = AdaptingDrafter(request(0), [DraftStats(lookup, controller), DraftStats(dear, controller)], controller)
    for length in range(10, 60):
        controller.begin(1)
        assert not drafter.propose([0] * length, 8)
    assert looked == list(range(10, 60))


def test_a_method_that_does_not_pay_spends_nothing_of_what_another_gains() -> None:
    """Prompt lookup is right at times and gains much; the other is never right and costs nearly two steps a try."""

    def speed(*kinds: Kind) -> tuple[float, list[int]]:
        controller, chance = SpeculationController(Costs(USUAL)), random.Random(3)
        records = [DraftStats(kind, controller) for kind in kinds]
        for _ in range(30):
            drafter = AdaptingDrafter(request(200), records, controller)
            history = [0] * 10
            while len(history) < 200:
                controller.begin(1)
                proposal = drafter.propose(history, 8)
                right = len(proposal) if 1 in proposal and chance.random() < 0.7 else 0
                accepted = [*proposal[:right], 2]
                drafter.observe(accepted)
                engine = Costs(USUAL).of(len(proposal) + 1) + (1.8 * len(proposal) if 3 in proposal else 0.0)
                controller.end(DraftStep((len(proposal) + 1,), False, len(accepted), engine, engine + HOST))
                history += accepted
        return controller.plain_s / controller.spent_s, [record.proposed for record in records]

    lookup = Kind(1e-5, token=1)
    lookup.start = lambda request: Sometimes(lookup)  # type: ignore[method-assign]
    alone, _ = speed(lookup)
    beside, (_, tried) = speed(lookup, Kind(1.8, token=3))
    assert alone > 1.1 and beside > alone - 0.02
    assert 0 < tried < 20


def test_no_hidden_states_are_asked_for_while_their_reader_sleeps() -> None:
    controller, hidden = SpeculationController(Costs(DEAR)), HiddenLog(4)
    hidden.most_tokens = 100
    reader, lookup = Kind(0.9), Kind(1e-5)
    reader.reads_hidden = True
    lookup.start = lambda request: Silent(lookup)  # type: ignore[method-assign]
    asked = request(0)._replace(hidden=hidden)
    drafter = AdaptingDrafter(asked, [DraftStats(lookup, controller), DraftStats(reader, controller)], controller)
    wanted = list[int]()
    for length in range(10, 300):
        if hidden.ask(1, length) is not None:  # of the step before
            wanted.append(length)
        controller.begin(1)
        assert not drafter.propose([0] * length, 8)
    assert wanted == [10, 139, 268]


def test_batches_are_timed_before_they_draft() -> None:
    for together, expected in ((1.1, False), (4.0, True)):  # four sequences in one plain step
        controller = SpeculationController(Costs(CHEAP))
        record = DraftStats(Kind(0.01), controller)
        drafters = [AdaptingDrafter(request(), [record], controller) for _ in range(4)]
        drafted, history = 0, [0] * 10
        for step in range(600):
            controller.begin(4)
            proposals = [drafter.propose(history, 8) for drafter in drafters]
            assert step >= 4 or not any(proposals)
            drafted += any(proposals)
            tokens = 0
            for drafter, proposal in zip(drafters, proposals, strict=True):
                drafter.observe([1] * len(proposal) + [2])
                tokens += len(proposal) + 1
            rows = tuple(len(proposal) + 1 for proposal in proposals)
            seconds = sum(map(Costs(CHEAP).of, rows)) if any(proposals) else together
            controller.end(DraftStep(rows, False, tokens, seconds, seconds + 0.01))
            history += [2] * (tokens // 4)
        assert (drafted > 300) == expected or together == 1.1
        assert controller.plain_s / controller.spent_s >= 0.98


@pytest.mark.parametrize("company", [1, 2, 3, 4, 9])
def test_verified_tokens_stay_within_the_admitted_memory(company: int) -> None:
    costs = Costs({1: 1.0, LONE_VERIFIED_ROWS: 1.0})
    controller, sure = SpeculationController(costs), Acceptance(guess=1.0)
    for _ in range(4):
        controller.begin(company)
        controller.end(DraftStep([1] * company, False, company, company * 1.0, company * 1.01))
    controller.begin(company)
    tokens = controller.choose(sure, DraftStats(Kind(0.0), controller), 100).tokens
    assert tokens == {1: 15, 2: 7, 3: 4, 4: 3, 9: 2}[company]
    assert company * (tokens + 1) <= verified_rows(company)


def test_skipped_plain_steps_count_as_reported_ones() -> None:
    seen, passing = SpeculationController(Costs(USUAL)), SpeculationController(Costs(USUAL))
    seen.add_request(1000)
    passing.add_request(1000)
    for step in range(40):
        seen.end(DraftStep([1], False, 1, 2.0, 2.1))
        if not passing.skips_plain_step():
            passing.end(DraftStep([1], False, 1, 2.0, 2.1))
        assert passing.steps == passing.tokens == step + 1 - (step + 1) % 8
    assert passing.plain_step_s() == pytest.approx(seen.plain_step_s(), rel=0.2)
    assert passing.spent_s == pytest.approx(seen.spent_s) and passing.affords(3.0) and seen.affords(3.0)
    passing.end(DraftStep([3], False, 1, 3.0, 3.1))
    assert not passing.skips_plain_step()  # what a plain step takes now is asked at once, after one that drafted


@pytest.mark.parametrize(("step_s", "asked"), [(0.1, 60), (6e-3, 30), (1e-3, 5)])
def test_fruitless_lookups_cost_a_small_share_of_a_step(step_s: float, asked: int) -> None:
    class Nothing(Proposes):
        looked = 0

        def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
            self.looked += 1
            return ()

    looks = Nothing(Kind(29e-6))
    looks.kind.start = lambda request: looks  # type: ignore[method-assign]
    controller = SpeculationController(Costs({1: step_s, 2: 1.5 * step_s}))
    drafter = AdaptingDrafter(request(), [DraftStats(looks.kind, controller)], controller)
    for length in range(10, 70):
        controller.begin(1)
        assert not drafter.propose([0] * length, 8)
        if not controller.skips_plain_step():
            controller.end(DraftStep([1], False, 1, step_s, step_s))
    assert looks.looked == asked


def test_acceptance_decays_and_uses_its_parent_as_prior() -> None:
    parent = Acceptance()
    for _ in range(100):
        Acceptance(parent).observe(1, 4)
    child = Acceptance(parent)
    assert child.expected(1) > 0.9 and child.expected(2) < 1.2 * child.expected(1)
    assert child.expected(3) < 1.3
    for _ in range(60):
        child.observe(0, 4)
    assert child.expected(1) < 0.15
    assert Acceptance(parent).expected(1) == parent.expected(1)
    assert not parent.is_new and Acceptance().is_new


def test_costs_are_interpolated_between_measured_sizes() -> None:
    costs = Costs({1: 1.0, 2: 0.9, 4: 2.0, 8: 4.0})
    assert [costs.of(rows) for rows in (1, 2, 3, 4, 6, 8)] == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0]
    assert costs.of(15) == pytest.approx(7.0)
    assert Costs({1: 2.0}).of(3) == 6.0
