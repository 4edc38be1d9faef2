"""ValueDiff: score a token by how far its value vector points away from the mean value, as KeyDiff does with keys.

KeyDiff: arXiv 2504.15364.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LEAST = np.float32(1e-6)  # length below which a vector has no direction


def valuediff(keys: NDArray[np.float32], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the negative cosine between each value and their mean direction."""
    directions = values / (_lengths(values) + _LEAST)
    mean = directions.mean(axis=0, keepdims=True)
    directions *= mean
    cosines: NDArray[np.float32] = directions.sum(axis=1) / (_lengths(mean)[0] + _LEAST)
    return -cosines


def _lengths(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths: NDArray[np.float32] = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    return lengths
