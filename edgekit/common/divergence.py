"""The distance of one model from another, token by token: KL divergence, perplexity, equal top tokens.

Uncertainties are paired: both models read the same tokens, so tokens that are hard for both cancel out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgekit.common.base import Frozen

Doubles: TypeAlias = NDArray[np.float64]

_ROWS_AT_ONCE = 256


class Divergence(Frozen):
    """One model against a reference, in nats, over `tokens` next-token distributions."""

    tokens: int  # compared distributions
    scored: int  # distributions whose next token is in the text
    kl_mean: float
    kl_error: float  # standard error of the mean
    kl_median: float
    kl_p999: float
    kl_max: float
    same_top: float  # share of distributions whose likeliest token is the same
    same_top_error: float
    perplexity: float
    reference_perplexity: float
    log_ratio: float  # ln(perplexity / reference perplexity)
    log_ratio_error: float  # paired
    probability_rms: float  # root mean square of the change of the true token's probability
    first_kl_mean: float  # of every window's first distribution, which does not depend on position encoding


class Pair(NamedTuple):
    """Logits after every token of one window, and the tokens."""

    tokens: tuple[int, ...]
    reference: NDArray[np.float32]
    found: NDArray[np.float32]


def divergence_of(pairs: Iterable[Pair]) -> Divergence:
    """Compare all windows. Equal logits give exactly zero."""
    kl, same, first, own, theirs = [], [], [], [], []
    for pair in pairs:
        for start in range(0, len(pair.tokens), _ROWS_AT_ONCE):
            rows = slice(start, min(len(pair.tokens), start + _ROWS_AT_ONCE))
            p, q = log_softmax(pair.reference[rows]), log_softmax(pair.found[rows])
            kl.append(kl_divergence(p, q))
            same.append((p.argmax(axis=-1) == q.argmax(axis=-1)).astype(np.float64))
            nexts = np.array(pair.tokens[start + 1 : rows.stop + 1], np.int64)
            places = np.arange(len(nexts))
            theirs.append(p[places, nexts])
            own.append(q[places, nexts])
            if start == 0:
                first.append(kl[-1][:1])
    every, equal, ours, reference = (np.concatenate(values) for values in (kl, same, own, theirs))
    ratio = reference - ours
    return Divergence(
        tokens=len(every),
        scored=len(ours),
        kl_mean=float(every.mean()),
        kl_error=_error(every),
        kl_median=float(np.median(every)),
        kl_p999=float(np.quantile(every, 0.999)),
        kl_max=float(every.max()),
        same_top=float(equal.mean()),
        same_top_error=_error(equal),
        perplexity=_perplexity(ours),
        reference_perplexity=_perplexity(reference),
        log_ratio=float(ratio.mean()),
        log_ratio_error=_error(ratio),
        probability_rms=float(np.sqrt(np.mean((np.exp(ours) - np.exp(reference)) ** 2))),
        first_kl_mean=float(np.concatenate(first).mean()),
    )


def kl_divergence(p: Doubles, q: Doubles) -> Doubles:
    """Return the KL divergence of log-probabilities `q` from `p`, row by row, in nats."""
    divergences: Doubles = np.maximum((np.exp(p) * (p - q)).sum(axis=-1), 0.0)
    return divergences


def log_softmax(logits: NDArray[np.float32]) -> Doubles:
    """Return log-probabilities in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    normalised: Doubles = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return normalised


def _perplexity(log_probabilities: Doubles) -> float:
    return math.exp(min(-float(log_probabilities.mean()), 700.0))


def _error(values: Doubles) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0
