"""Drafting adapts: near the best fixed length where it pays, and never more than 2 % lost where it does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from edgekit.cache import CachePolicy
from edgekit.memory import LONE_VERIFIED_ROWS, verified_rows
from edgekit.runtime.drafting import Request, Step
from edgekit.runtime.drafting.acceptance import Acceptance
from edgekit.runtime.drafting.adapting import AdaptingDrafter, Record
from edgekit.runtime.drafting.costs import Costs
from edgekit.runtime.drafting.pace import Pace
from edgekit.runtime.sampling import Sampler, Sampling

# What verifying k tokens costs, in steps: kernels that are limited by memory, by arithmetic, and in between.
CHEAP = {1: 1.0, 2: 1.05, 3: 1.1, 4: 1.15, 5: 1.2, 6: 1.25, 7: 1.3, 8: 1.35, 9: 1.4, 16: 2.0}
USUAL = {1: 1.0, 2: 1.3, 3: 1.55, 4: 1.65, 5: 2.1, 6: 2.2, 7: 2.6, 8: 2.8, 9: 3.2, 16: 4.5}
DEAR = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0, 6: 6.0, 7: 7.0, 8: 8.0, 9: 9.0, 16: 16.0}
HOST = 0.01
Rate = Callable[[int], float]
CLOCK = [0.0]


@pytest.fixture(autouse=True)
def _counted_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgekit.runtime.drafting.adapting.perf_counter", lambda: CLOCK[0])


class Proposes:
    """A drafter of which the test knows how often it is right, without any tokens."""

    grade = 0

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        CLOCK[0] += self.waiting_s(history) + self.kind.draft_s(limit)
        return [1] * limit

    def waiting_s(self, history: Sequence[int]) -> float:
        return self.kind.reading_s if len(history) == 10 else 0.0

    def observe(self, accepted: Sequence[int]) -> None: ...
    def close(self) -> None: ...


class Kind:
    name = "known"
    bytes = 0

    def __init__(self, token_s: float, tokens: int = 8, reading_s: float = 0.0) -> None:
        self.token_s, self.tokens, self.reading_s = token_s, tokens, reading_s

    def start(self, request: Request) -> Proposes:
        return Proposes(self)

    def draft_s(self, tokens: int) -> float:
        return self.token_s * tokens

    def close(self) -> None: ...


def request(last: int = 100_000) -> Request:
    return Request([0], Sampler(Sampling(), 16), CachePolicy(), last, lambda: None)


def decode(
    rate: Rate,
    true: dict[int, float],
    draft: float,
    *,
    tokens: int = 3000,
    calibrated: dict[int, float] | None = None,
    noise: Callable[[random.Random], float] = lambda chance: 1.0,
    seed: int = 0,
) -> tuple[float, Pace]:
    """Speed against plain decoding, on a clock that is only counted; one plain step takes one second."""
    chance, pace, truth = random.Random(seed), Pace(Costs(calibrated or true)), Costs(true)
    records = [Record(Kind(max(draft, 1e-4)), pace)]
    drafter: AdaptingDrafter = AdaptingDrafter(request(), records, pace)
    spent, done, history = 0.0, 0, [0] * 10
    while done < tokens:
        pace.begin(1)
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
        if proposal or not pace.passes():
            pace.end(Step((len(proposal) + 1,), False, len(accepted), engine, engine + host))
        history += accepted
        spent += engine + host
        done += len(accepted)
    return done * (1 + HOST) / spent, pace


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
def test_it_comes_near_the_best_length_and_never_loses(rate: float, true: dict[int, float], draft: float) -> None:
    speed, _ = decode(lambda place: rate, true, draft)
    assert speed >= 0.98
    assert speed >= 0.9 * best_fixed(rate, true, draft)


@pytest.mark.parametrize("seed", range(4))
def test_a_wrong_calibration_costs_no_more_than_two_percent(seed: int) -> None:
    speed, _ = decode(lambda place: 0.5, DEAR, 0.1, calibrated=CHEAP, seed=seed)
    assert speed >= 0.98
    speed, _ = decode(lambda place: 0.9, CHEAP, 0.02, calibrated=USUAL, seed=seed)
    assert speed >= 0.65 * best_fixed(0.9, CHEAP, 0.02)


def test_a_busy_machine_does_not_turn_it_off_for_good() -> None:
    def bursts(chance: random.Random) -> float:
        return 20.0 if chance.random() < 0.02 else chance.uniform(0.9, 1.6)

    quiet, _ = decode(lambda place: 0.8, USUAL, 0.1)
    busy, pace = decode(lambda place: 0.8, USUAL, 0.1, noise=bursts, tokens=6000)
    assert pace.drafted_steps > 0.7 * pace.steps
    plain, _ = decode(lambda place: 0.0, DEAR, 0.0, noise=bursts, tokens=6000)
    assert busy / plain > 0.8 * quiet


def test_text_that_becomes_predictable_turns_it_on_and_off_again() -> None:
    speed, pace = decode(lambda place: 0.9 if 2000 <= place < 4000 else 0.05, USUAL, 0.05, tokens=6000)
    gain = best_fixed(0.9, USUAL, 0.05)
    assert speed >= 0.9 * 6000 / (4000 / 0.98 + 2000 / gain)
    assert pace.drafted_steps > 100


def test_it_says_what_it_gained() -> None:
    speed, pace = decode(lambda place: 0.8, USUAL, 0.1)
    assert pace.plain_s / pace.spent_s == pytest.approx(speed, rel=0.03)
    assert pace.promised == pytest.approx(best_fixed(0.8, USUAL, 0.1), rel=0.15)


def test_a_long_prompt_is_read_only_where_the_answer_can_pay_for_it() -> None:
    def first(reading_s: float, last: int) -> Sequence[int]:
        pace = Pace(Costs(CHEAP))
        pace.begin(1)
        kind = Kind(0.05, reading_s=reading_s)
        return AdaptingDrafter(request(last), [Record(kind, pace)], pace).propose([0] * 10, 8)

    assert first(0.0, 20) and first(20.0, 1000) and first(2.0, 20)
    assert not first(20.0, 30) and not first(500.0, 100_000)


def test_of_two_kinds_the_better_one_is_asked() -> None:
    pace = Pace(Costs(USUAL))
    good, bad = Kind(0.1), Kind(0.1)
    records = [Record(bad, pace), Record(good, pace)]
    drafter = AdaptingDrafter(request(), records, pace)
    chance: Any = random.Random(1)
    history = [0] * 10
    for _ in range(2000):
        pace.begin(1)
        proposal = drafter.propose(history, 8)
        before = [record.proposed for record in records]
        rate = 0.3 if drafter.newest is records[0] else 0.9
        right = 0
        while right < len(proposal) and chance.random() < rate:
            right += 1
        accepted = [1] * right + [2]
        drafter.observe(accepted)
        assert [record.proposed for record in records] != before or not proposal
        engine = Costs(USUAL).of(len(proposal) + 1)
        pace.end(Step((len(proposal) + 1,), False, len(accepted), engine, engine + 0.1 * len(proposal)))
        history += accepted
    assert records[1].proposed > 10 * records[0].proposed


def test_company_is_timed_before_it_drafts_and_drafts_only_where_that_pays() -> None:
    for together, expected in ((1.1, False), (4.0, True)):  # four sequences in one plain step
        pace = Pace(Costs(CHEAP))
        record = Record(Kind(0.01), pace)
        drafters = [AdaptingDrafter(request(), [record], pace) for _ in range(4)]
        drafted, history = 0, [0] * 10
        for step in range(600):
            pace.begin(4)
            proposals = [drafter.propose(history, 8) for drafter in drafters]
            assert step >= 4 or not any(proposals)
            drafted += any(proposals)
            tokens = 0
            for drafter, proposal in zip(drafters, proposals, strict=True):
                drafter.observe([1] * len(proposal) + [2])
                tokens += len(proposal) + 1
            rows = tuple(len(proposal) + 1 for proposal in proposals)
            seconds = sum(map(Costs(CHEAP).of, rows)) if any(proposals) else together
            pace.end(Step(rows, False, tokens, seconds, seconds + 0.01))
            history += [2] * (tokens // 4)
        assert (drafted > 300) == expected or together == 1.1
        assert pace.plain_s / pace.spent_s >= 0.98


@pytest.mark.parametrize("company", [1, 2, 3, 4, 9])
def test_no_step_verifies_more_rows_than_memory_was_admitted_for(company: int) -> None:
    costs = Costs({1: 1.0, LONE_VERIFIED_ROWS: 1.0})
    pace, sure = Pace(costs), Acceptance(guess=1.0)
    for _ in range(4):
        pace.begin(company)
        pace.end(Step([1] * company, False, company, company * 1.0, company * 1.01))
    pace.begin(company)
    tokens = pace.choose(sure, Record(Kind(0.0), pace), 100).tokens
    assert tokens == {1: 15, 2: 7, 3: 4, 4: 3, 9: 2}[company]
    assert company * (tokens + 1) <= verified_rows(company)


def test_plain_steps_that_pass_unseen_are_taken_for_those_that_are_seen() -> None:
    seen, passing = Pace(Costs(USUAL)), Pace(Costs(USUAL))
    for step in range(40):
        seen.end(Step([1], False, 1, 2.0, 2.1))
        if not passing.passes():
            passing.end(Step([1], False, 1, 2.0, 2.1))
        assert passing.steps == passing.tokens == step + 1 - (step + 1) % 8
    assert passing.plain_step_s() == pytest.approx(seen.plain_step_s(), rel=0.2)
    assert passing.spent_s == pytest.approx(seen.spent_s) and passing.affords(3.0) and seen.affords(3.0)
    passing.end(Step([3], False, 1, 3.0, 3.1))
    assert not passing.passes()  # what a plain step takes now is asked at once, after one that drafted


@pytest.mark.parametrize(("step_s", "asked"), [(0.1, 60), (6e-3, 30), (1e-3, 5)])
def test_looking_for_what_is_not_there_costs_a_small_share_of_a_step(step_s: float, asked: int) -> None:
    class Nothing(Proposes):
        looked = 0

        def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
            self.looked += 1
            return ()

    looks = Nothing(Kind(29e-6))
    looks.kind.start = lambda request: looks  # type: ignore[method-assign]
    pace = Pace(Costs({1: step_s, 2: 1.5 * step_s}))
    drafter = AdaptingDrafter(request(), [Record(looks.kind, pace)], pace)
    for length in range(10, 70):
        pace.begin(1)
        assert not drafter.propose([0] * length, 8)
        if not pace.passes():
            pace.end(Step([1], False, 1, step_s, step_s))
    assert looks.looked == asked


def test_acceptance_fades_and_borrows_from_its_parent() -> None:
    parent = Acceptance()
    for _ in range(100):
        Acceptance(parent).observe(1, 4)
    child = Acceptance(parent)
    assert child.rate(0) > 0.9 and child.rate(1) < 0.2
    assert child.expected(3) < 1.3
    for _ in range(60):
        child.observe(0, 4)
    assert child.rate(0) < 0.15
    assert Acceptance(parent).rate(0) == parent.rate(0)
    assert not parent.is_new and Acceptance().is_new


def test_costs_between_measured_sizes_lie_between_them() -> None:
    costs = Costs({1: 1.0, 2: 0.9, 4: 2.0, 8: 4.0})
    assert [costs.of(rows) for rows in (1, 2, 3, 4, 6, 8)] == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0]
    assert costs.of(15) == pytest.approx(7.0)
    assert Costs({1: 2.0}).of(3) == 6.0
