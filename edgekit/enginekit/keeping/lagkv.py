"""LagKV (arXiv 2504.04704): a token is worth more the more its channels vary in the range of the tokens after it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LAG = 64  # tokens that are compared with as many after them


def lagkv(keys: NDArray[np.float32], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Score tokens by keys and values; those without followers are compared with the newest."""
    return _spread(keys) + _spread(values)


def _spread(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    scores = np.empty(len(vectors), np.float32)
    for start in range(0, len(vectors), LAG):
        after = vectors[start + LAG : start + 2 * LAG]
        after = after if len(after) == LAG else vectors[-LAG:]
        least, most = after.min(axis=0), after.max(axis=0)
        channels = (vectors[start : start + LAG] - least) / (most - least + np.float32(1e-6))
        spread = np.exp(channels.std(axis=1))
        scores[start : start + LAG] = spread / spread.sum()
    return scores
