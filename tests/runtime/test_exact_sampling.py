"""The sampler equals a slow and exact one, at every temperature, over every filter, on real and on odd logits.

The slow one weighs tokens in extended precision and, where sums are close, compares them as fractions.
"""

from __future__ import annotations

import os
import struct
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from sampling_laws import LOGITS, assert_follows

from edgekit.errors import TargetFailed
from edgekit.runtime.generation.sampling import Sampler, Sampling, filtered, gumbel_argmax

REAL = np.load(Path(__file__).parents[1] / "data" / "smollm2_logits.npz")["logits"].astype(np.float32)
TEMPERATURES = [5e-324, 1e-45, 1e-38, 1e-20, 1e-7, 1e-6, 1e-5, 1e-3, 0.1, 0.7, 1.0, 2.0, 100.0]
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top-k 40": {"top_k": 40},
    "top-p 0.9": {"top_p": 0.9},
    "top-p nearly all": {"top_p": 0.999999},
    "min-p 0.05": {"min_p": 0.05},
    "min-p 1": {"min_p": 1.0},
    "typical 0.8": {"typical_p": 0.8},
    "all of them": {"top_k": 997, "top_p": 0.95, "min_p": 0.001, "typical_p": 0.9},
}
DRAWS = int(os.environ.get("EDGEKIT_TEST_DRAWS", "8000"))  # of the slow test, in all; a million took 14 minutes
RANDOM = np.random.default_rng(8)
ROWS: dict[str, np.ndarray] = {
    "a real one": REAL[0],
    "a real and flat one": REAL[3],
    "few tokens": RANDOM.normal(0, 3, 50).astype(np.float32),
    "many equals": RANDOM.integers(-4, 4, 4999).astype(np.float32),
    "all equal": np.full(4999, -7.25, np.float32),
    "half impossible": np.where(RANDOM.random(4999) < 0.5, -np.inf, RANDOM.normal(0, 2, 4999)).astype(np.float32),
    "huge": (RANDOM.normal(0, 1, 4999) * 1e37).astype(np.float32),
    "tiny": (RANDOM.normal(0, 1, 4999) * 1e-41).astype(np.float32),
    "far from zero": (RANDOM.normal(0, 1, 4999) + 16_000_000).astype(np.float32),
}


class Unsure(Exception):
    """Raised if two deciding numbers are too close for extended precision."""


def levels_of(scores: np.ndarray, temperature: float) -> np.ndarray:
    with np.errstate(over="ignore"):  # where long doubles are doubles
        return (scores.astype(np.longdouble) - scores.max()) / np.longdouble(temperature)


def first_to_hold(weights: np.ndarray, wanted: Any) -> int:
    held = np.cumsum(weights)
    if np.abs(held / wanted - 1).min() < 1e-12:
        raise Unsure
    return int(np.searchsorted(held, wanted)) + 1


def exactly_kept(scores: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the ids that pass the filters, by their definition."""
    ids = np.flatnonzero(scores > -np.inf)
    ids = ids[np.lexsort((ids, -scores[ids].astype(np.float64)))]  # best first; of equals the first
    if sampling.top_k is not None:
        ids = ids[: sampling.top_k]
    levels = levels_of(scores[ids], sampling.temperature)
    if sampling.top_p is not None:
        weights = np.exp(levels)
        ids = ids[: first_to_hold(weights, weights.sum() * np.longdouble(sampling.top_p))]
        levels = levels[: len(ids)]
    if sampling.min_p is not None:
        bound = np.log(np.longdouble(sampling.min_p))
        if sampling.min_p < 1 and np.abs(levels / bound - 1).min() < 1e-12:
            raise Unsure
        ids, levels = ids[levels >= bound], levels[levels >= bound]
    if sampling.typical_p is not None:
        possible = levels > -100
        ids, levels = ids[possible], levels[possible]
        weights = np.exp(levels)
        expected = (weights * levels).sum() / weights.sum()
        far = np.abs(levels - expected)
        order = np.lexsort((ids, far))
        count = first_to_hold(weights[order], weights.sum() * np.longdouble(sampling.typical_p))
        last = far[order[count - 1]]
        if ((np.abs(far - last) < 1e-12) & (levels != levels[order[count - 1]])).any():
            raise Unsure
        ids = ids[order[:count]]
    return np.sort(ids)


def noise_of(ids: np.ndarray, seed: int, position: int) -> np.ndarray:
    """The noise that a seed draws at a position, written once more."""
    stride, start, flip = struct.unpack("<3I", blake2b(struct.pack("<QQ", seed, position), digest_size=12).digest())
    bits = (ids.astype(np.uint64) * (stride | 1) + start) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = ((bits ^ (bits >> np.uint64(shift))) * factor) & 0xFFFFFFFF
    bits = (bits ^ (bits >> np.uint64(16))) ^ flip
    return -np.log(-np.log((bits + 0.5) * 2.0**-32))


def winners(scores: np.ndarray, ids: np.ndarray, temperature: float, seed: int, position: int) -> set[int]:
    """The token with the largest score / temperature + noise; with it any that float64 cannot tell from it."""
    return winners_of(possible_winners(scores, ids, temperature), temperature, seed, position)


def possible_winners(scores: np.ndarray, ids: np.ndarray, temperature: float) -> Any:
    """Ids, scores and levels without those that no noise lifts to the top: it lies between -3.14 and 22.88."""
    levels = levels_of(scores[ids], temperature)
    near = levels > -27
    return ids[near], scores[ids[near]], levels[near]


def winners_of(possible: Any, temperature: float, seed: int, position: int) -> set[int]:
    ids, scores, levels = possible
    noise = noise_of(ids, seed, position)
    sums = levels + noise
    close = np.flatnonzero(sums > sums.max() - 1e-9)
    if len(close) == 1:
        return {int(ids[close[0]])}
    high, unit = Fraction(float(scores.max())), Fraction(temperature)
    exact = {int(ids[i]): (Fraction(float(scores[i])) - high) / unit + Fraction(float(noise[i])) for i in close}
    return {token for token, total in exact.items() if total > max(exact.values()) - Fraction(1, 10**14)}


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("name", FILTERS, ids=str)
def test_each_choice_is_exact(name: str, row: str) -> None:
    scores, unsure = ROWS[row], 0
    for place, temperature in enumerate(TEMPERATURES):
        sampler = Sampler(Sampling(temperature=temperature, seed=place, **FILTERS[name]), len(scores))
        try:
            kept = exactly_kept(scores, sampler.sampling)
        except Unsure:
            unsure += 1
            continue
        ids, _ = filtered(scores, sampler.sampling)
        found = np.arange(len(scores)) if ids is None else ids
        # Nobody notices a token whose chance is zero, nor one of less than e^-30 of the likeliest's.
        seen = levels_of(scores, temperature) > -30
        assert found[seen[found]].tolist() == kept[seen[kept]].tolist(), temperature
        for position in range(4):
            right = winners(scores, kept, temperature, place, position)
            assert sampler.choose(scores, position) in right, (temperature, position)
    assert unsure <= 2 or row == "tiny"  # whose surprises differ by 1e-41


@pytest.mark.slow
@pytest.mark.parametrize("name", FILTERS, ids=str)
def test_very_many_choices_are_exact(name: str) -> None:
    draws = DRAWS // len(FILTERS) // len(TEMPERATURES)
    for place, temperature in enumerate(TEMPERATURES):
        scores = RANDOM.normal(0, 3, 4096).astype(np.float32)
        if place % 2:
            scores *= np.float32(max(temperature, 1e-37))  # so that noise decides
        sampler = Sampler(Sampling(temperature=temperature, seed=100 + place, **FILTERS[name]), len(scores))
        possible = possible_winners(scores, exactly_kept(scores, sampler.sampling), temperature)
        for position in range(draws):
            assert sampler.choose(scores, position) in winners_of(possible, temperature, 100 + place, position)


@settings(deadline=None, max_examples=60)
@given(
    vocabulary=st.sampled_from([4096, 4097, 20_000, 300_000]),
    spread=st.sampled_from([0.0, 1e-45, 1e-30, 1e-6, 1.0, 8.0, 1e6, 1e38]),
    temperature=st.floats(-45, 2).map(lambda power: 10.0**power) | st.sampled_from(TEMPERATURES),
    impossible=st.sampled_from([0.0, 0.5, 0.9999]),
    seed=st.integers(0, 2**63 - 1),
)
def test_short_cut_finds_the_largest_of_all_sums(vocabulary, spread, temperature, impossible, seed) -> None:
    random = np.random.default_rng(seed)
    scores = (random.standard_normal(vocabulary).clip(-3, 3) * spread).astype(np.float32)
    scores[random.random(vocabulary) < impossible] = -np.inf
    scores[random.integers(vocabulary)] = 0.0
    everything = np.arange(vocabulary)
    right = winners(scores, everything, temperature, seed, 3)
    assert gumbel_argmax(scores, None, seed, 3, temperature) in right
    assert gumbel_argmax(scores, everything, seed, 3, temperature) in right


@pytest.mark.parametrize("temperature", [1e-6, 1e-7, 1e-12, 1e-30, 1e-38, 1e-40, 1e-45, 1e-46, 1e-200, 5e-324])
@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
def test_at_a_small_temperature_the_likeliest_token_is_taken(options: dict[str, Any], temperature: float) -> None:
    for row in REAL:
        best = np.flatnonzero(row == row.max())
        sampler = Sampler(Sampling(temperature=temperature, seed=4, **options), len(row))
        assert {sampler.choose(row, position) for position in range(10)} <= set(best.tolist())
    one = REAL[0]
    assert (one == one.max()).sum() == 1
    assert sampler.choose(one, 0) == Sampler(Sampling(**options), len(one)).choose(one, 0)


@pytest.mark.parametrize("temperature", [1e-40, 1e-37, 1e-30, 1e-7, 1e-3, 100.0])
@pytest.mark.parametrize("filler", [0, 5000], ids=["few tokens", "many tokens"])
def test_distribution_is_the_softmax_at_the_temperature(temperature: float, filler: int) -> None:
    scores = (LOGITS.astype(np.float64) * temperature).astype(np.float32)
    row = np.append(scores, np.full(filler, -1e38 if filler else 0, np.float32))
    chances = np.exp(scores.astype(np.float64) / temperature)
    sampler = Sampler(Sampling(temperature=temperature, seed=6), len(row))
    counts = np.bincount([sampler.choose(row, place) for place in range(6000)], minlength=len(row))
    assert counts[len(LOGITS) :].sum() == 0
    assert_follows(counts[: len(LOGITS)], chances / chances.sum())


@pytest.mark.parametrize("size", [40, 5000], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1.0])
@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
def test_invalid_logits_are_one_clear_error(options: dict[str, Any], temperature: float, size: int) -> None:
    plain = np.linspace(0, 1, size, dtype=np.float32)
    some = np.zeros(size, bool)
    some[[3, 7]] = True
    sampler = Sampler(Sampling(temperature=temperature, seed=2, **options), size)

    def refused(row: np.ndarray, allowed: np.ndarray | None, match: str) -> None:
        before = row.copy()
        with pytest.raises(TargetFailed, match=match) as caught:
            sampler.choose(row, 11, allowed)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 200
        assert np.array_equal(before, row, equal_nan=True)

    for place in (0, 3, size // 2, size - 1):
        for bad in (np.nan, np.inf):
            row = plain.copy()
            row[place] = bad
            for allowed in (None, some):
                refused(row, allowed, f"the engine returned {bad} as a logit")
    nothing = np.full(size, -np.inf, np.float32)
    refused(nothing, None, "the engine returned -inf as a logit")
    refused(nothing, some, "the engine returned -inf as a logit")
    refused(plain, np.zeros(size, bool), "position 11: its mask allows none")
    gone = plain.copy()
    gone[[3, 7]] = -np.inf
    refused(gone, some, "position 11: the engine returned -inf for every allowed token")
    gone[7] = -1e38
    assert sampler.choose(gone, 11, some) == 7


@pytest.mark.parametrize("penalty", [0.01, 10.0])
def test_penalties_of_huge_scores_cause_no_overflow(penalty: float) -> None:
    row = np.array([1e38, -1e38, 5e37, 0.0], np.float32)
    sampler = Sampler(Sampling(temperature=1.0, repetition_penalty=penalty, seed=0), 4, prompt=[1, 2])
    if penalty < 1:
        with pytest.raises(TargetFailed, match="inf"):
            sampler.choose(row, 0)
    else:
        assert sampler.choose(row, 0) == 0
