"""SnapKV (arXiv 2404.14469): a token's score is the attention that the newest tokens pay to it and its neighbours."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgekit.enginekit.keeping.scorer import ByAttention

NEIGHBOURS = 3  # tokens on each side that share their attention: the paper pools over seven


def snapkv(attention: NDArray[np.float32]) -> NDArray[np.float32]:
    """Score tokens by the mean attention of all heads, smoothed over neighbours."""
    mean: NDArray[np.float32] = attention.mean(axis=0)
    padded = np.pad(mean, NEIGHBOURS, mode="edge")
    total = np.zeros_like(mean)
    for index in range(2 * NEIGHBOURS + 1):
        total += padded[index : index + len(mean)]
    return total


SNAPKV = ByAttention(snapkv, newest=32)
