"""The one sampler: penalties, filters and a choice by Gumbel noise that is keyed by (seed, position, token).

A position's choice depends on its logits and on the tokens before it alone, so a seed reproduces a text whatever was
proposed, batched or reused. It knows nothing of engines, text or grammars (a grammar hands it a mask).
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

from edgekit.errors import InvalidInput, TargetFailed
from edgekit.frozen import Frozen

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Row = NDArray[np.float32]
    Ids = NDArray[np.int64]
    Mask = NDArray[np.bool_]

MAX_SEED = 2**63 - 1
Unit = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]


class Sampling(Frozen):
    """How tokens are chosen: penalties and bias, then temperature, top-k, top-p, min-p and typical, in this order.

    Each filter sees what the one before it left. Temperature 0 takes the likeliest token and reads no noise.
    """

    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] = 0.0
    top_k: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    top_p: Unit | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    typical_p: Unit | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10.0, allow_inf_nan=False)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)] = 0.0
    logit_bias: Annotated[
        dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]],
        Field(max_length=1024, default_factory=dict),
    ]
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None  # how many alternatives to report beside each token


class Logprob(NamedTuple):
    """What the model itself thought of a token, before penalties, temperature and filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens, best first


class Sampler:
    """Chooses the tokens of one request, one position after the other."""

    def __init__(self, sampling: Sampling, vocabulary: int, prompt: Sequence[int] = ()) -> None:
        outside = [token for token in sampling.logit_bias if token >= vocabulary]
        if outside:
            raise InvalidInput(f"logit_bias: token {outside[0]} is outside the vocabulary of {vocabulary}")
        self.sampling = sampling
        self.seed = secrets.randbelow(MAX_SEED) if sampling.seed is None else sampling.seed
        self._vocabulary = vocabulary
        self._added: NDArray[np.float32] | None = None  # bias less presence and frequency penalties, by token
        self._counts: dict[int, int] = {}
        self._seen: dict[int, None] = dict.fromkeys(prompt) if sampling.repetition_penalty != 1.0 else {}
        self._counts_matter = bool(sampling.presence_penalty or sampling.frequency_penalty)
        if sampling.logit_bias or self._counts_matter:
            self._added = np.zeros(vocabulary, np.float32)
            for token, bias in sampling.logit_bias.items():
                self._added[token] = bias
        self._adjusts = self._added is not None or sampling.repetition_penalty != 1.0
        # The usual case, greedy without any penalty, must not pay for the others.
        self._plain_greedy = sampling.temperature == 0.0 and not self._adjusts

    def choose(self, row: Row, position: int, allowed: Mask | None = None) -> int:
        """The token for `position`, given the logits after all tokens before it."""
        if self._plain_greedy and allowed is None:
            best = int(row.argmax())
            _check_finite(row[best])
            return best
        scores = self._adjusted(row) if self._adjusts or allowed is not None else row
        high = scores[scores.argmax()]  # NaN, if there is one; quicker than max
        _check_finite(high)
        if allowed is not None:
            scores[~allowed] = -np.inf
            high = scores.max()
            if high == -np.inf:
                why = "the engine answered -inf for every allowed one" if allowed.any() else "its mask allows none"
                raise TargetFailed(f"no token can be chosen for position {position}: {why}")
        if self.sampling.temperature == 0.0:
            return int(scores.argmax())
        ids, kept = filtered(scores, self.sampling, high)
        place = gumbel_argmax(kept, ids, self.seed, position, self.sampling.temperature)
        return place if ids is None else int(ids[place])

    def observe(self, token: int) -> None:
        """`token` is now part of the text; penalties count it."""
        if self.sampling.repetition_penalty != 1.0:
            self._seen[token] = None
        if self._counts_matter:
            assert self._added is not None
            first = token not in self._counts
            self._counts[token] = self._counts.get(token, 0) + 1
            self._added[token] -= self.sampling.frequency_penalty + (self.sampling.presence_penalty if first else 0.0)

    def fork(self) -> Sampler:
        """One that goes its own way from here, with the same noise: what it observes stays with it."""
        other = copy(self)
        other._counts, other._seen = dict(self._counts), dict(self._seen)
        if self._added is not None:
            other._added = self._added.copy()
        return other

    def logprob(self, row: Row, token: int) -> Logprob:
        """What the model thought of `token`, with as many alternatives as were asked for."""
        high = float(row.max())
        norm = high + math.log(float(np.exp(row - np.float32(high)).sum(dtype=np.float64)))
        top = _best(row, min(self.sampling.logprobs or 0, len(row)), np.float32(high))
        ranked = sorted(((int(i), float(row[i]) - norm) for i in top), key=lambda pair: (-pair[1], pair[0]))
        return Logprob(token, float(row[token]) - norm, tuple(ranked))

    def _adjusted(self, row: Row) -> Row:
        scores = row.astype(np.float32, copy=True)
        with np.errstate(over="ignore"):  # an infinite score is refused where it is the best, and else never chosen
            if self._seen:
                seen = np.fromiter(self._seen, np.int64, len(self._seen))
                values = scores[seen]
                penalty = np.float32(self.sampling.repetition_penalty)
                scores[seen] = np.where(values > 0, values / penalty, values * penalty)
            if self._added is not None:
                scores += self._added
        return scores


def filtered(scores: Row, sampling: Sampling, high: np.float32 | None = None) -> tuple[Ids | None, Row]:
    """The tokens that may be chosen (None: all) and their scores, as they came; `high` is the largest, if it is known.

    Scores are compared as they are, which is exact. What depends on the temperature is computed from their distances to
    the largest, in float64 wherever rounding could decide.
    """
    high = scores.max() if high is None else high
    ids: Ids | None = None
    if sampling.top_k is not None and sampling.top_k < len(scores):
        ids = _best(scores, sampling.top_k, high)
        scores = scores[ids]
    filters = ((_top_p, sampling.top_p, 1.0), (_min_p, sampling.min_p, 0.0), (_typical, sampling.typical_p, 1.0))
    for keep, limit, everything in filters:  # only the last of them can drop the largest
        if limit is not None and limit != everything:
            kept = keep(scores, limit, sampling.temperature, high)
            ids = kept if ids is None else ids[kept]
            scores = scores[kept]
    return ids, scores


def _best(scores: Row, count: int, high: np.float32) -> Ids:
    """The `count` best, in the order of their ids; of equals, those with the smallest."""
    if count == 0:
        return np.zeros(0, np.int64)
    # Usually the best stand near the top, and only that part is partitioned.
    for depth in (6.0, 12.0, np.inf):
        near = np.flatnonzero(scores > high - np.float32(depth))
        if len(near) >= count:
            break
    else:  # some are -inf
        near = np.arange(len(scores))
    values = scores[near]
    return _down_to(near, values, np.partition(values, len(values) - count)[len(values) - count], count)


def _down_to(ids: Ids, values: Row, bound: np.float32, count: int) -> Ids:
    """The `count` best of `ids`, whose least has the value `bound`."""
    kept = values >= bound
    spare = int(np.count_nonzero(kept)) - count
    if spare:
        kept[np.flatnonzero(values == bound)[-spare:]] = False
    return ids[np.flatnonzero(kept)]


def _top_p(scores: Row, mass: float, temperature: float, high: np.float32) -> Ids:
    """The fewest best tokens that hold at least `mass` of the probability."""
    rough = _rough_weights(scores, temperature, high)
    # Tokens below this bound hold less than 1 - mass together, so the nucleus lies above it: only that part is sorted,
    # and weighed in float64.
    near = np.flatnonzero(rough >= rough.sum() * np.float32(0.99 * (1.0 - mass) / len(rough)))
    values = scores[near]
    falling = np.sort(values)[::-1]
    held = _weights(falling, temperature, high)
    np.cumsum(held, out=held)
    rough[near] = 0.0
    rest, top = float(rough.sum()), float(held[-1])
    slack = rest * _ROUGHNESS
    last, end = np.searchsorted(held, (mass * (top + rest - slack), mass * (top + rest + slack)))
    if last != end:  # the rounding of the rest would decide
        last = np.searchsorted(held, mass * _weights(scores, temperature, high).sum())
    last = min(int(last), len(falling) - 1)
    return _down_to(near, values, falling[last], last + 1)


def _min_p(scores: Row, share: float, temperature: float, high: np.float32) -> Ids:
    """Tokens at least `share` as likely as the likeliest."""
    reach = -math.log(share) * temperature
    near = np.flatnonzero(scores > _below(float(high) - reach))
    kept: Ids = near[np.float64(high) - scores[near] <= reach]
    return kept


def _typical(scores: Row, mass: float, temperature: float, high: np.float32) -> Ids:
    """The fewest tokens that hold `mass`, taking first those whose surprise is nearest to the expected surprise."""
    # Tokens further down weigh nothing in float64, and are the last in order.
    near = np.flatnonzero(scores > _below(float(high) - 60.0 * temperature))
    levels = _levels(scores[near], temperature, high)
    weights = np.exp(levels)
    wanted = mass * weights.sum()
    # A level is a surprise with its sign turned, up to a constant that all share.
    far = np.abs(levels - (weights * levels).sum() / weights.sum())
    ranked = np.sort(far)
    low, up = 0, len(ranked) - 1
    while low < up:
        middle = (low + up) // 2
        if np.dot(weights, far <= ranked[middle]) >= wanted:
            up = middle
        else:
            low = middle + 1
    kept = far < ranked[low]
    last = np.flatnonzero(far == ranked[low])
    missing = np.searchsorted(np.cumsum(weights[last]), wanted - weights[kept].sum()) + 1
    kept[last[:missing]] = True
    chosen: Ids = near[np.flatnonzero(kept)]
    return chosen


def _levels(scores: Row, temperature: float, high: np.float32 | float) -> NDArray[np.float64]:
    """The distance of each score from the largest, in units of the temperature (0 or less)."""
    # Scores that differ do so by 1e-45 at least: at this temperature any difference is beyond all noise, and none
    # beyond float64.
    levels: NDArray[np.float64] = scores - np.float64(high)
    levels /= max(temperature, 1e-200)
    return levels


def _weights(scores: Row, temperature: float, high: np.float32) -> NDArray[np.float64]:
    """exp of the levels."""
    levels = _levels(scores, temperature, high)
    return np.exp(levels, out=levels)


# float32 rounds a level by 2^-24 of it four times, and those below -104 weigh nothing; exp and the sum add 2^-18.
_ROUGHNESS = 2.0**-15


def _rough_weights(scores: Row, temperature: float, high: np.float32) -> Row:
    """exp of the levels in float32: the sum of any of them is right to _ROUGHNESS of itself."""
    if temperature < 1e-30:  # near the end of float32
        return _weights(scores, temperature, high).astype(np.float32)
    with np.errstate(over="ignore"):
        weights: Row = scores - high
        if temperature != 1.0:
            weights /= np.float32(temperature)
    return np.exp(weights, out=weights)


def _below(bound: float) -> np.float32:
    """A float32 that is surely less than `bound`, by more than float64 rounds."""
    with np.errstate(over="ignore"):
        below: np.float32 = np.nextafter(np.float32(bound), np.float32(-np.inf))
    return below


_LIKELY = 0.998  # most tokens draw less noise than this quantile, and are ruled out without a logarithm
_LIKELY_BITS = np.uint32(int(_LIKELY * 2**32))
_LIKELY_NOISE = -math.log(-math.log(_LIKELY))


def gumbel_argmax(scores: Row, ids: Ids | None, seed: int, position: int, temperature: float = 1.0) -> int:
    """The place of the largest sum of score / temperature and noise: token i wins with its softmax probability.

    Sums are taken in float64 from the distances to the largest score, so that no temperature is too small: where a
    distance outweighs any noise the largest score wins, and equal scores are told apart by their noise alone.
    """
    tokens = _all_tokens(len(scores)) if ids is None else ids.astype(np.uint32)
    bits = _random_bits(tokens, seed, position)
    first = int(scores.argmax())
    high = float(scores[first])
    if len(scores) < 4096:
        return int((_levels(scores, temperature, high) + _gumbel(bits)).argmax())
    # Nobody wins who cannot beat the best of two known sums: that takes a likely noise or a high score. The bound for
    # scores is lowered by far more than the sums are rounded, so the winner is that of all sums.
    lucky = int(bits.argmax())
    bar = float(max(_gumbel(bits[first]), (float(scores[lucky]) - high) / temperature + _gumbel(bits[lucky])))
    bound = _below(high + (bar - _LIKELY_NOISE - 1e-6) * temperature)
    runners = np.flatnonzero((bits >= _LIKELY_BITS) | (scores > bound))
    return int(runners[(_levels(scores[runners], temperature, high) + _gumbel(bits[runners])).argmax()])


@lru_cache(maxsize=8)
def _all_tokens(vocabulary: int) -> NDArray[np.uint32]:
    return np.arange(vocabulary, dtype=np.uint32)


def _gumbel(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    surprise: NDArray[np.float64] = -np.log((bits + 0.5) * 2.0**-32)
    noise: NDArray[np.float64] = np.negative(np.log(surprise))
    return noise


def _random_bits(tokens: NDArray[np.uint32], seed: int, position: int) -> NDArray[np.uint32]:
    """32 random bits for each token: a keyed hash, so that any subset of tokens can be asked for."""
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
        raise TargetFailed(f"the engine answered {best} where a logit should be; `edgekit doctor` tests the engine")
