"""Medians, spreads, percentiles, and a significance test for two samples. Pure arithmetic."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import median
from typing import NamedTuple

import numpy as np

from edgekit.apps.bench.measurement import CaseResult, Metric, Summary, Trial

SIGNIFICANT = 0.05
_EXACT_RANKS = 12


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie, interpolated between neighbours."""
    return float(np.quantile(values, share))


def summary_of(values: Sequence[float]) -> Summary:
    middle, low, high = median(values), min(values), max(values)
    spread = (high - low) / middle if middle > 0 else 0.0
    return Summary(median=middle, low=low, high=high, spread=spread, count=len(values))


def _prefill(trial: Trial) -> float | None:
    seconds = sum(request.prefill_s for request in trial.requests)
    return sum(request.timed_tokens for request in trial.requests) / seconds if seconds > 0 else None


def _decode(trial: Trial) -> float | None:
    seconds = sum(request.decode_s for request in trial.requests)
    tokens = sum(max(0, request.tokens - 1) for request in trial.requests)
    return tokens / seconds if seconds > 0 and tokens else None


def _gap(share: float) -> Callable[[Trial], float | None]:
    def of_trial(trial: Trial) -> float | None:
        gaps = [gap for request in trial.requests for gap in request.gaps_s]
        return percentile(gaps, share) if gaps else None

    return of_trial


def _together(trial: Trial) -> float | None:
    seconds = sum(each.seconds for each in trial.together)
    return sum(each.tokens for each in trial.together) / seconds if seconds > 0 else None


METRICS: dict[Metric, Callable[[Trial], float | None]] = {
    "prefill_tokens_per_s": _prefill,
    "decode_tokens_per_s": _decode,
    "first_token_s": lambda trial: median([request.first_token_s for request in trial.requests]),
    "gap_p50_s": _gap(0.5),
    "gap_p90_s": _gap(0.9),
    "gap_p99_s": _gap(0.99),
    "gap_max_s": _gap(1.0),
    "total_s": lambda trial: trial.total_s,
    "together_tokens_per_s": _together,
}


def values_of(case: CaseResult, metric: Metric) -> list[float]:
    """Return a metric of every valid trial."""
    values = [METRICS[metric](trial) for trial in case.trials if trial.invalid is None]
    return [value for value in values if value is not None]


def summaries(trials: Sequence[Trial]) -> dict[Metric, Summary]:
    """Summarise every metric over the valid trials."""
    return _summaries([trial for trial in trials if trial.invalid is None])


class ShownSummary(NamedTuple):
    """A summary for display: over the valid trials or, if there are none, over disturbed ones."""

    summary: Summary
    is_disturbed: bool


def shown_summary(case: CaseResult, metric: Metric) -> ShownSummary | None:
    """Return the summary of a metric to show; None if no trial has the metric."""
    valid = case.summary.get(metric)
    if valid is not None:
        return ShownSummary(valid, False)
    disturbed = _summaries(case.trials).get(metric)
    return None if disturbed is None else ShownSummary(disturbed, True)


def _summaries(trials: Sequence[Trial]) -> dict[Metric, Summary]:
    found: dict[Metric, Summary] = {}
    for name, read in METRICS.items():
        values = [value for trial in trials if (value := read(trial)) is not None]
        if values:
            found[name] = summary_of(values)
    return found


def differ(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the two-sided p-value of the Mann-Whitney test."""
    if not one or not other:
        return 1.0
    ordered = sorted(other)
    smaller = sum(bisect_left(ordered, a) + bisect_right(ordered, a) for a in one) / 2
    n, m = len(one), len(other)
    far = abs(smaller - n * m / 2)
    if n <= _EXACT_RANKS and m <= _EXACT_RANKS:
        ways = _rank_sums(n, m)
        total = sum(ways)
        return sum(count for value, count in enumerate(ways) if abs(value - n * m / 2) >= far - 1e-9) / total
    deviation = math.sqrt(n * m * (n + m + 1) / 12)
    return math.erfc(max(0.0, far - 0.5) / deviation / math.sqrt(2))


@lru_cache(maxsize=1024)
def _rank_sums(n: int, m: int) -> tuple[int, ...]:
    """Return the distribution of the Mann-Whitney U: item u is the number of orders of n and m values with U = u."""
    if n == 0 or m == 0:
        return (1,)
    # The largest value is one of the n, which is above all of the m, or one of the m.
    ways = [0] * m + list(_rank_sums(n - 1, m))
    for value, count in enumerate(_rank_sums(n, m - 1)):
        ways[value] += count
    return tuple(ways)
