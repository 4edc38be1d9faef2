"""Counts of values by bounds, as Prometheus keeps them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Bounds of the seconds of a whole request; they are vLLM's, so that quantiles agree.
REQUEST_S = (
    .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip


class Histogram:
    """Counts of values: `counts[i]` is for values above `bounds[i - 1]` up to `bounds[i]`; the last has no bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def observe(self, value: float, count: int = 1) -> None:
        """Add `value`, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def quantile(self, share: float) -> float | None:
        """Return the lowest bound that covers `share` of the values; None without values, or above all bounds."""
        wanted, seen = share * self.count, 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            seen += count
            if seen and seen >= wanted:
                return bound
        return None

    def copy(self) -> Histogram:
        """Return a histogram that later values do not change."""
        copied = Histogram(self.bounds)
        copied.counts, copied.sum = self.counts.copy(), self.sum
        return copied
