"""The sampler: penalties, filters, and a choice by Gumbel noise keyed by (seed, position, token).

A choice depends only on the logits and the tokens before it, so a seed reproduces a text whatever was drafted, batched
or cached. Equal logits give equal choices on every processor and in the native library: exponentials and
logarithms that decide come from `portable_math`, sums that decide have a fixed order, and ties go to smaller ids.
numpy's, which are faster, are used where their last bits cannot change a choice.
"""

from __future__ import annotations

import math
import secrets
import struct
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
from pydantic import Field

from edgekit.common.base import Frozen
from edgekit.common.bounds import MAX_SEED
from edgekit.errors import InvalidInput, TargetFailed
from edgekit.runtime.generation import portable_math

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Row = NDArray[np.float32]
    Ids = NDArray[np.int64]
    Mask = NDArray[np.bool_]

MAX_TOP = 20  # alternatives that are reported with a token
Unit = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]


class Sampling(Frozen):
    """The options of sampling, applied in this order: penalties and bias, temperature, top-k, top-p, min-p, typical.

    Each filter works on the tokens that the filter before it kept. Temperature 0 takes the likeliest token.
    """

    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] = Field(
        default=0.0, description="Randomness of the choice; 0 takes the likeliest token. `chat` has its own default."
    )
    top_k: Annotated[int, Field(ge=1, le=1 << 20)] | None = Field(
        default=None, description="Choose among the N likeliest tokens."
    )
    top_p: Unit | None = Field(
        default=None, description="Choose among the fewest tokens that have this much probability together."
    )
    min_p: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = Field(
        default=None, description="Choose among tokens with at least this share of the likeliest token's probability."
    )
    typical_p: Unit | None = Field(
        default=None, description="Choose among the most typical tokens that have this much probability together."
    )
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10.0, allow_inf_nan=False)] = Field(
        default=1.0, description="Above 1, tokens of the text so far become less likely."
    )
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)] = Field(
        default=0.0, description="Subtract this once from the logit of every token in the answer."
    )
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)] = Field(
        default=0.0, description="Subtract this from the logit of a token for each time it is in the answer."
    )
    logit_bias: Annotated[
        dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]],
        Field(max_length=1024, default_factory=dict),
    ]
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = Field(
        default=None, description="The same seed gives the same text."
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None  # how many alternatives to report with every token

    def for_answer(self, place: int) -> Sampling:
        """Return the options of answer number `place` of several; with a seed, each answer gets its own."""
        return self if self.seed is None else self.model_copy(update={"seed": (self.seed + place) % (MAX_SEED + 1)})


class Logprob(NamedTuple):
    """The log probability of a token by the model itself, before penalties, temperature and filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens, best first


class Sampler:
    """Choose the tokens of one request, one position after the other."""

    def __init__(self, sampling: Sampling, vocabulary: int, prompt: Sequence[int] = ()) -> None:
        outside = [token for token in sampling.logit_bias if token >= vocabulary]
        if outside:
            raise InvalidInput(f"logit_bias: token {outside[0]} is outside the vocabulary of {vocabulary}")
        self.sampling = sampling
        self.seed = secrets.randbelow(MAX_SEED) if sampling.seed is None else sampling.seed
        self._added: NDArray[np.float32] | None = None  # by token: bias minus presence and frequency penalties
        self._counts: dict[int, int] = {}
        self._seen: dict[int, None] = dict.fromkeys(prompt) if sampling.repetition_penalty != 1.0 else {}
        self._counts_matter = bool(sampling.presence_penalty or sampling.frequency_penalty)
        if sampling.logit_bias or self._counts_matter:
            self._added = np.zeros(vocabulary, np.float32)
            for token, bias in sampling.logit_bias.items():
                self._added[token] = bias
        self._adjusts = self._added is not None or sampling.repetition_penalty != 1.0
        # A fast path for the usual case: greedy without penalties.
        self._plain_greedy = sampling.temperature == 0.0 and not self._adjusts

    def choose(self, logits: Row, position: int, allowed: Mask | None = None) -> int:
        """Return the token for `position`, from the logits after all tokens before it."""
        if self._plain_greedy and allowed is None:
            best = int(logits.argmax())
            _check_finite(logits[best])
            return best
        scores = self._adjusted(logits) if self._adjusts or allowed is not None else logits
        high = scores[scores.argmax()]  # NaN if there is one; faster than max
        _check_finite(high)
        if allowed is not None:
            scores[~allowed] = -np.inf
            high = scores.max()
            if high == -np.inf:
                why = "the engine returned -inf for every allowed token" if allowed.any() else "its mask allows none"
                raise TargetFailed(f"no token can be chosen for position {position}: {why}")
        if self.sampling.temperature == 0.0:
            return int(scores.argmax())
        ids, kept = filtered(scores, self.sampling, high)
        place = gumbel_argmax(kept, ids, self.seed, position, self.sampling.temperature)
        return place if ids is None else int(ids[place])

    def observe(self, token: int) -> None:
        """Count `token`, which is now part of the text, for the penalties."""
        if self.sampling.repetition_penalty != 1.0:
            self._seen[token] = None
        if self._counts_matter:
            assert self._added is not None
            first = token not in self._counts
            self._counts[token] = self._counts.get(token, 0) + 1
            self._added[token] -= self.sampling.frequency_penalty + (self.sampling.presence_penalty if first else 0.0)

    def fork(self) -> Sampler:
        """Return an independent copy with the same noise."""
        other = copy(self)
        other._counts, other._seen = dict(self._counts), dict(self._seen)
        if self._added is not None:
            other._added = self._added.copy()
        return other

    def logprob(self, logits: Row, token: int) -> Logprob:
        """Return the log probability of `token`, with the number of alternatives that the options ask for."""
        high = float(logits.max())
        norm = high + math.log(float(np.exp(logits - np.float32(high)).sum(dtype=np.float64)))
        top = tuple((best, float(logits[best]) - norm) for best in best_tokens(logits, self.sampling.logprobs or 0))
        return Logprob(token, float(logits[token]) - norm, top)

    def _adjusted(self, logits: Row) -> Row:
        scores = logits.astype(np.float32, copy=True)
        with np.errstate(over="ignore"):  # an infinite score is refused if it is the best, and never chosen otherwise
            if self._seen:
                seen = np.fromiter(self._seen, np.int64, len(self._seen))
                values = scores[seen]
                penalty = np.float32(self.sampling.repetition_penalty)
                scores[seen] = np.where(values > 0, values / penalty, values * penalty)
            if self._added is not None:
                scores += self._added
        return scores


def filtered(scores: Row, sampling: Sampling, high: np.float32 | None = None) -> tuple[Ids | None, Row]:
    """Return the tokens that pass the filters (None: all) and their unchanged scores. `high` is the largest score.

    Scores are compared directly, which is exact. Values that depend on the temperature are computed from the distances
    to the largest score, in float64 wherever rounding could decide.
    """
    high = scores.max() if high is None else high
    ids: Ids | None = None
    if sampling.top_k is not None and sampling.top_k < len(scores):
        ids = _best(scores, sampling.top_k, high)
        scores = scores[ids]
    filters = ((_top_p, sampling.top_p, 1.0), (_min_p, sampling.min_p, 0.0), (_typical, sampling.typical_p, 1.0))
    for keep, limit, everything in filters:  # only `_typical` can drop the largest score
        if limit is not None and limit != everything:
            kept = keep(scores, limit, sampling.temperature, high)
            ids = kept if ids is None else ids[kept]
            scores = scores[kept]
    return ids, scores


def best_tokens(logits: Row, count: int) -> list[int]:
    """Return the `count` likeliest tokens, best first; equally likely ones in the order of their ids."""
    best = _best(logits, min(count, len(logits)), logits.max())
    return sorted(best.tolist(), key=lambda token: (-logits[token], token))


def _best(scores: Row, count: int, high: np.float32) -> Ids:
    """Return the `count` best tokens in the order of their ids. Among equal scores, smaller ids win."""
    if count == 0:
        return np.zeros(0, np.int64)
    # Usually the best are near the top, so only that part is partitioned.
    for depth in (6.0, 12.0, np.inf):
        near = np.flatnonzero(scores > high - np.float32(depth))
        if len(near) >= count:
            break
    else:  # some are -inf
        near = np.arange(len(scores))
    values = scores[near]
    return _down_to(near, values, np.partition(values, len(values) - count)[len(values) - count], count)


def _down_to(ids: Ids, values: Row, bound: np.float32, count: int) -> Ids:
    """Return the `count` best of `ids`, given the lowest score among them, `bound`."""
    kept = values >= bound
    excess = int(np.count_nonzero(kept)) - count
    if excess:
        kept[np.flatnonzero(values == bound)[-excess:]] = False
    return ids[np.flatnonzero(kept)]


_SLACK = 1e-9  # far more than all roundings of a sum in float64


def _top_p(scores: Row, mass: float, temperature: float, high: np.float32) -> Ids:
    """Keep the fewest best tokens with at least `mass` of the probability."""
    rough = _rough_weights(scores, temperature, high)
    # Tokens below this bound have less than 1 - mass together, so the nucleus is above it: only that part is sorted,
    # with weights in float64.
    near = np.flatnonzero(rough >= rough.sum() * np.float32(0.99 * (1.0 - mass) / len(rough)))
    values = scores[near]
    falling = np.sort(values)[::-1]
    cumulative = np.cumsum(np.exp(_levels(falling, temperature, high)))
    rough[near] = 0.0
    rest, top = float(rough.sum()), float(cumulative[-1])
    slack = rest * _ROUGHNESS + top * _SLACK
    last, end = np.searchsorted(cumulative, (mass * (top + rest - slack), mass * (top + rest + slack)))
    if last != end or last == len(falling):  # rounding would decide
        near, values, falling = np.arange(len(scores)), scores, np.sort(scores)[::-1]
        weights = portable_math.exp(_levels(scores, temperature, high))
        cumulative = np.cumsum(portable_math.exp(_levels(falling, temperature, high)))
        last = min(int(np.searchsorted(cumulative, mass * portable_math.total(weights))), len(falling) - 1)
    return _down_to(near, values, falling[last], int(last) + 1)


def _min_p(scores: Row, share: float, temperature: float, high: np.float32) -> Ids:
    """Keep tokens at least `share` as likely as the likeliest."""
    reach = _surprise(share) * temperature
    near = np.flatnonzero(scores > _below(float(high) - reach))
    kept: Ids = near[np.float64(high) - scores[near] <= reach]
    return kept


@lru_cache(maxsize=8)
def _surprise(share: float) -> float:
    return -float(portable_math.log(np.array([max(share, 2.0**-1022)]))[0])  # the smallest normal number


def _typical(scores: Row, mass: float, temperature: float, high: np.float32) -> Ids:
    """Keep the fewest tokens with `mass`, nearest to the expected surprise first."""
    near = np.flatnonzero(scores > _below(float(high) - 60.0 * temperature))
    levels = _levels(scores[near], temperature, high)
    has_weight = levels >= -60.0  # in float64
    near, levels = near[has_weight], levels[has_weight]
    weights = portable_math.exp(levels)
    whole = portable_math.total(weights)
    # A level is the negative surprise, up to a common constant.
    far = np.abs(levels - portable_math.total(weights * levels) / whole)
    # Only tokens that may be needed are sorted: the nearest bins, which hold a little more than the mass.
    bins = (far * 16.0).astype(np.int64)
    enough = np.searchsorted(np.cumsum(np.bincount(bins, weights)), mass * whole * (1.0 + _SLACK))
    ranked = np.flatnonzero(bins <= enough)
    ranked = ranked[np.argsort(far[ranked], kind="stable")]
    last = np.searchsorted(np.cumsum(weights[ranked]), mass * whole)
    chosen: Ids = near[np.sort(ranked[: last + 1])]
    return chosen


def _levels(scores: Row, temperature: float, high: np.float32 | float) -> NDArray[np.float64]:
    """Return each score's distance from the largest, in units of the temperature (0 or less)."""
    # Different scores differ by at least 1e-45. At this temperature any difference exceeds all noise, and none exceeds
    # float64.
    levels: NDArray[np.float64] = scores - np.float64(high)
    levels /= max(temperature, 1e-200)
    return levels


# float32 rounds a level four times by 2^-24 of it, and levels below -104 have no weight; exp and the sum add 2^-18.
_ROUGHNESS = 2.0**-15


def _rough_weights(scores: Row, temperature: float, high: np.float32) -> Row:
    """Return exp of the levels in float32; the relative error of any sum of them is at most _ROUGHNESS."""
    if temperature < 1e-30:  # near the limit of float32
        return np.exp(_levels(scores, temperature, high)).astype(np.float32)
    with np.errstate(over="ignore"):
        weights: Row = scores - high
        if temperature != 1.0:
            weights /= np.float32(temperature)
    return np.exp(weights, out=weights)


def _below(bound: float) -> np.float32:
    """Return the next float32 below `bound`, so that rounding in float64 cannot matter."""
    with np.errstate(over="ignore"):
        below: np.float32 = np.nextafter(np.float32(bound), np.float32(-np.inf))
    return below


_LIKELY = 0.998  # quantile of the noise; tokens with less noise are ruled out without a logarithm
_LIKELY_BITS = np.uint32(int(_LIKELY * 2**32))
_LIKELY_NOISE = -math.log(-math.log(_LIKELY))


def gumbel_argmax(scores: Row, ids: Ids | None, seed: int, position: int, temperature: float = 1.0) -> int:
    """Return the index of the largest sum of score / temperature and noise: token i with its softmax probability.

    Sums are computed in float64 from the distances to the largest score, so no temperature is too small: where a
    distance exceeds any noise the largest score wins, and among equal scores the noise decides.
    """
    tokens = _all_tokens(len(scores)) if ids is None else ids.astype(np.uint32)
    bits = _random_bits(tokens, seed, position)
    first = int(scores.argmax())
    high = float(scores[first])
    if len(scores) < 4096:
        return _largest_sum(_levels(scores, temperature, high), bits)
    # The winner is at least as large as the best of two known sums, so it has rare noise or a high score. The bound for
    # scores is lowered by far more than the rounding of the sums, so the result is the same as with all sums.
    lucky = int(bits.argmax())
    bar = float(
        max(_rough_gumbel(bits[first]), (float(scores[lucky]) - high) / temperature + _rough_gumbel(bits[lucky]))
    )
    bound = _below(high + (bar - _LIKELY_NOISE - 1e-6) * temperature)
    runners = np.flatnonzero((bits >= _LIKELY_BITS) | (scores > bound))
    return int(runners[_largest_sum(_levels(scores[runners], temperature, high), bits[runners])])


def _largest_sum(levels: NDArray[np.float64], bits: NDArray[np.uint32]) -> int:
    """Return the index of the largest sum of level and noise; of equal sums, the first."""
    sums = levels + _rough_gumbel(bits)
    tied = np.flatnonzero(sums >= sums.max() - _SLACK)
    return int(tied[(levels[tied] + gumbel(bits[tied])).argmax()] if len(tied) > 1 else tied[0])


@lru_cache(maxsize=8)
def _all_tokens(vocabulary: int) -> NDArray[np.uint32]:
    return np.arange(vocabulary, dtype=np.uint32)


def gumbel(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Return the Gumbel noise made from random bits."""
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-32
    return -portable_math.log(-portable_math.log(uniform))


def _rough_gumbel(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    noise: NDArray[np.float64] = -np.log(-np.log((bits + 0.5) * 2.0**-32))
    return noise


def _random_bits(tokens: NDArray[np.uint32], seed: int, position: int) -> NDArray[np.uint32]:
    """Return 32 random bits for each token, by a keyed hash, so that they can be computed for any subset."""
    stride, start, flip = struct.unpack("<3I", blake2b(struct.pack("<QQ", seed, position), digest_size=12).digest())
    bits = tokens * np.uint32(stride | 1)
    bits += np.uint32(start)
    shifted = bits >> np.uint32(16)
    bits ^= shifted
    bits *= np.uint32(0x7FEB352D)
    bits ^= np.right_shift(bits, np.uint32(15), out=shifted)
    bits *= np.uint32(0x846CA68B)
    bits ^= np.right_shift(bits, np.uint32(16), out=shifted)
    bits ^= np.uint32(flip)
    return bits


def _check_finite(best: np.float32) -> None:
    if not math.isfinite(best):
        raise TargetFailed(f"the engine returned {best} as a logit; `edgekit doctor` tests the engine")
