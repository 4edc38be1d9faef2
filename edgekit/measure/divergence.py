"""How far one model's answers are from another's, token by token: KL divergence, perplexity, equal top tokens.

Uncertainties are paired: both models read the same tokens, so what is hard for both cancels out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgekit.frozen import Frozen

Floats: TypeAlias = NDArray[np.float64]

_ROWS_AT_ONCE = 256


class Divergence(Frozen):
    """One model against a reference, in nats, over `tokens` next-token distributions."""

    tokens: int  # distributions that were compared
    scored: int  # of them, those whose next token is known
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
    first_kl_mean: float  # of the first distribution of each window, which no position can influence


class Pair(NamedTuple):
    """Logits after every token of one window, and the tokens."""

    tokens: tuple[int, ...]
    reference: NDArray[np.float32]
    found: NDArray[np.float32]


def divergence_of(pairs: Iterable[Pair]) -> Divergence:
    """All windows together. Equal logits give exactly zero."""
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
    every, equal, said, wanted = (np.concatenate(values) for values in (kl, same, own, theirs))
    ratio = wanted - said
    return Divergence(
        tokens=len(every),
        scored=len(said),
        kl_mean=float(every.mean()),
        kl_error=_error(every),
        kl_median=float(np.median(every)),
        kl_p999=float(np.quantile(every, 0.999)),
        kl_max=float(every.max()),
        same_top=float(equal.mean()),
        same_top_error=_error(equal),
        perplexity=_perplexity(said),
        reference_perplexity=_perplexity(wanted),
        log_ratio=float(ratio.mean()),
        log_ratio_error=_error(ratio),
        probability_rms=float(np.sqrt(np.mean((np.exp(said) - np.exp(wanted)) ** 2))),
        first_kl_mean=float(np.concatenate(first).mean()),
    )


def kl_divergence(p: Floats, q: Floats) -> Floats:
    """KL divergence of the log-probabilities `q` from `p`, row by row, in nats."""
    found: Floats = np.maximum((np.exp(p) * (p - q)).sum(axis=-1), 0.0)
    return found


def log_softmax(logits: NDArray[np.float32]) -> Floats:
    """Log-probabilities in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    found: Floats = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return found


def _perplexity(log_probabilities: Floats) -> float:
    return math.exp(min(-float(log_probabilities.mean()), 700.0))


def _error(values: Floats) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0
