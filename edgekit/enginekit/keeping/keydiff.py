"""KeyDiff (arXiv 2504.15364): a token is worth more the less its key points where all keys point."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LEAST = np.float32(1e-6)  # length below which a vector has no direction


def keydiff(keys: NDArray[np.float32], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Score tokens by their keys, as cached: turned by their rotary positions."""
    return apart(keys)


def apart(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the negative cosine between each vector and the mean direction."""
    directions = vectors / (_lengths(vectors) + _LEAST)
    mean = directions.mean(axis=0, keepdims=True)
    directions *= mean
    cosines: NDArray[np.float32] = directions.sum(axis=1) / (_lengths(mean)[0] + _LEAST)
    return -cosines


def _lengths(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths: NDArray[np.float32] = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    return lengths
