"""Logits and a chi-square check, for tests of samplers."""

from __future__ import annotations

import math

import numpy as np

LOGITS = np.array([2.0, 1.5, 1.5, 1.0, 0.3, 0.0, -0.4, -1.0, -1.5, -2.0, -2.5, -3.0], np.float32)


def assert_follows(counts: np.ndarray, chances: np.ndarray) -> None:
    """Assert the distribution by chi-square at about p = 0.0001. Seeds are fixed, so results never vary."""
    assert counts[chances == 0].sum() == 0, "a token that may not be chosen was chosen"
    expected = chances[chances > 0] * counts.sum()
    statistic = float(((counts[chances > 0] - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    bound = freedom * (1 - 2 / (9 * max(1, freedom)) + 3.72 * math.sqrt(2 / (9 * max(1, freedom)))) ** 3
    assert statistic <= bound, f"chi-square {statistic:.1f} of {bound:.1f} allowed: {counts} for {expected.round()}"
