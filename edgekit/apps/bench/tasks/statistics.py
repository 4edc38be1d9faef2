"""Intervals and tests for shares of right answers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgekit.common.base import Frozen

_Z95 = 1.959963984540054


class ShareInterval(Frozen):
    """A share with its 95 % interval."""

    right: int
    asked: int
    low: float
    high: float

    @property
    def share(self) -> float:
        return self.right / self.asked


class PairedDifference(Frozen):
    """Two artifacts on the same items: share of the first minus share of the second."""

    asked: int
    only_first: int
    only_second: int
    difference: float
    low: float  # 95 %
    high: float
    p_value: float  # of the exact McNemar test


def wilson(right: int, asked: int) -> ShareInterval:
    """Return the Wilson score interval, which stays within 0 and 1 and is valid for few items."""
    share, squared = right / asked, _Z95**2 / asked
    centre = (share + squared / 2) / (1 + squared)
    half = _Z95 * math.sqrt(share * (1 - share) / asked + squared / (4 * asked)) / (1 + squared)
    return ShareInterval(right=right, asked=asked, low=max(0.0, centre - half), high=min(1.0, centre + half))


def paired(first: Sequence[bool], second: Sequence[bool]) -> PairedDifference:
    """Compare two artifacts item by item, so that an item's difficulty cancels out."""
    pairs = list(zip(first, second, strict=True))
    both, only_first, only_second = (pairs.count(kind) for kind in ((True, True), (True, False), (False, True)))
    low, high = newcombe(both, only_first, only_second, len(pairs) - both - only_first - only_second)
    return PairedDifference(
        asked=len(pairs),
        only_first=only_first,
        only_second=only_second,
        difference=(only_first - only_second) / len(pairs),
        low=low,
        high=high,
        p_value=mcnemar(only_first, only_second),
    )


def newcombe(both: int, only_first: int, only_second: int, neither: int) -> tuple[float, float]:
    """Return the 95 % interval of a paired difference (Newcombe 1998, method 10), wide even if no item differs."""
    asked = both + only_first + only_second + neither
    one, two = wilson(both + only_first, asked), wilson(both + only_second, asked)
    product = one.right * (asked - one.right) * two.right * (asked - two.right)
    excess = float(both * neither - only_first * only_second)
    if excess > 0:
        excess = max(0.0, excess - asked / 2)
    correlation = excess / math.sqrt(product) if product else 0.0
    difference = one.share - two.share

    def distance(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * correlation * a * b + b * b))

    low = difference - distance(one.share - one.low, two.high - two.share)
    high = difference + distance(one.high - one.share, two.share - two.low)
    return max(-1.0, low), min(1.0, high)


def mcnemar(one: int, other: int) -> float:
    """Return the p-value of the exact McNemar test, from the items that only one or only the other got right."""
    total, fewer = one + other, min(one, other)
    tail = float(sum(math.comb(total, count) for count in range(fewer + 1)) / 2**total)
    return min(1.0, 2 * tail)
