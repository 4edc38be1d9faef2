"""The one sampler: penalties, filters and a choice by Gumbel noise that is keyed by (seed, position, token).

A position's choice depends on its logits and on the tokens before it alone, so a seed reproduces a text whatever was
proposed, batched or reused. It knows nothing of engines, text or grammars (a grammar hands it a mask).
"""

from __future__ import annotations

import math
import secrets
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

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
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0, allow_inf_nan=False)] = 1.0
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
        # The usual case, greedy without any penalty, must not pay for the others.
        self._plain_greedy = sampling.temperature == 0.0 and self._added is None and sampling.repetition_penalty == 1.0

    def choose(self, row: Row, position: int, allowed: Mask | None = None) -> int:
        """The token for `position`, given the logits after all tokens before it."""
        if self._plain_greedy and allowed is None:
            best = int(row.argmax())
            _check_finite(row[best])
            return best
        scores = self._adjusted(row)
        _check_finite(scores.max())
        if allowed is not None:
            scores[~allowed] = -np.inf
        if self.sampling.temperature == 0.0:
            return int(scores.argmax())
        ids, kept = filtered(scores, self.sampling)
        place = gumbel_argmax(kept, ids, self.seed, position)
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

    def logprob(self, row: Row, token: int) -> Logprob:
        """What the model thought of `token`, with as many alternatives as were asked for."""
        count = min(self.sampling.logprobs or 0, len(row))
        high = float(row.max())
        norm = high + math.log(float(np.exp(row - high, dtype=np.float64).sum()))
        top: Any = np.argpartition(row, len(row) - count)[len(row) - count :] if count else ()
        ranked = sorted(((int(i), float(row[i]) - norm) for i in top), key=lambda pair: (-pair[1], pair[0]))
        return Logprob(token, float(row[token]) - norm, tuple(ranked))

    def _adjusted(self, row: Row) -> Row:
        scores = row.astype(np.float32, copy=True)
        if self._seen:
            seen = np.fromiter(self._seen, np.int64, len(self._seen))
            values = scores[seen]
            penalty = np.float32(self.sampling.repetition_penalty)
            scores[seen] = np.where(values > 0, values / penalty, values * penalty)
        if self._added is not None:
            scores += self._added
        return scores


def filtered(scores: Row, sampling: Sampling) -> tuple[Ids | None, Row]:
    """The tokens that may be chosen (None: all) and their scores, divided by the temperature."""
    scores = scores / np.float32(sampling.temperature)
    ids: Ids | None = None
    if sampling.top_k is not None and sampling.top_k < len(scores):
        ids = _top_k(scores, sampling.top_k)
        scores = scores[ids]
    filters = ((_top_p, sampling.top_p), (_min_p, sampling.min_p), (_typical, sampling.typical_p))
    for keep, limit in filters:
        if limit is not None:
            kept = keep(scores, limit)
            ids = kept if ids is None else ids[kept]
            scores = scores[kept]
    return ids, scores


def _top_k(scores: Row, count: int) -> Ids:
    """The `count` best; of equals, those with the smallest ids."""
    bound = np.partition(scores, len(scores) - count)[len(scores) - count]
    better = np.flatnonzero(scores > bound)
    equal = np.flatnonzero(scores == bound)[: count - len(better)]
    return np.sort(np.concatenate([better, equal]))


def _top_p(scores: Row, mass: float) -> Ids:
    """The fewest best tokens that hold at least `mass` of the probability."""
    chances = _softmax(scores)
    # Tokens below this bound hold less than 1 - mass together, so the nucleus lies above it: only that part is sorted.
    near = np.flatnonzero(chances >= (1.0 - mass) / len(chances))
    order = near[np.argsort(-chances[near], kind="stable")]
    return np.sort(_reaching(order, chances, mass))


def _min_p(scores: Row, share: float) -> Ids:
    """Tokens at least `share` as likely as the likeliest."""
    if share == 0.0:
        return np.flatnonzero(scores > -np.inf)
    return np.flatnonzero(scores >= scores.max() + math.log(share))


def _typical(scores: Row, mass: float) -> Ids:
    """The fewest tokens that hold `mass`, taking first those whose surprise is nearest to the expected surprise."""
    chances = _softmax(scores)
    possible = np.flatnonzero(chances > 0)
    surprise = -np.log(chances[possible])
    expected = float((chances[possible] * surprise).sum())
    order = possible[np.argsort(np.abs(surprise - expected), kind="stable")]
    return np.sort(_reaching(order, chances, mass))


def _reaching(order: Ids, chances: NDArray[np.float64], mass: float) -> Ids:
    """The start of `order` that holds at least `mass`, or all of it where rounding leaves it short."""
    count = int(np.searchsorted(np.cumsum(chances[order]), mass)) + 1
    return order[:count]


def _softmax(scores: Row) -> NDArray[np.float64]:
    chances: NDArray[np.float64] = np.exp(scores - scores.max(), dtype=np.float64)
    chances /= chances.sum()
    return chances


_LIKELY = 0.99  # most tokens draw less noise than this quantile, and are ruled out without a logarithm
_LIKELY_BITS = np.uint32(int(_LIKELY * 2**32))
_LIKELY_NOISE = -math.log(-math.log(_LIKELY))


def gumbel_argmax(scores: Row, ids: Ids | None, seed: int, position: int) -> int:
    """The place of the largest score plus noise: token i wins with its softmax probability."""
    tokens = np.arange(len(scores), dtype=np.uint32) if ids is None else ids.astype(np.uint32)
    bits = _random_bits(tokens, seed, position)
    if len(scores) < 4096:
        return int((scores + _gumbel(bits)).argmax())
    # Nobody wins who cannot beat the best of two known sums: a likely noise, or a high score, is needed.
    known = np.array([scores.argmax(), bits.argmax()])
    bar = float((scores[known] + _gumbel(bits[known])).max())
    runners = np.flatnonzero((bits >= _LIKELY_BITS) | (scores > bar - _LIKELY_NOISE))
    return int(runners[(scores[runners] + _gumbel(bits[runners])).argmax()])


def _gumbel(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    surprise: NDArray[np.float64] = -np.log((bits + 0.5) * 2.0**-32)
    noise: NDArray[np.float64] = np.negative(np.log(surprise))
    return noise


def _random_bits(tokens: NDArray[np.uint32], seed: int, position: int) -> NDArray[np.uint32]:
    """32 random bits for each token: a keyed hash, so that any subset of tokens can be asked for."""
    key = struct.unpack("<4I", blake2b(struct.pack("<QQ", seed, position), digest_size=16).digest())
    bits = tokens.copy()
    for plus, flip in ((key[0], key[1]), (key[2], key[3])):
        bits += np.uint32(plus)
        bits ^= bits >> np.uint32(16)
        bits *= np.uint32(0x7FEB352D)
        bits ^= bits >> np.uint32(15)
        bits *= np.uint32(0x846CA68B)
        bits ^= bits >> np.uint32(16)
        bits ^= np.uint32(flip)
    return bits


def _check_finite(best: np.float32) -> None:
    if not math.isfinite(best):
        raise TargetFailed(f"the engine answered {best} where a logit should be; `edgekit doctor` tests the engine")
