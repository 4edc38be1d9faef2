"""KeyDiff (arXiv 2504.15364): a token is worth more the less its key points where all keys point."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LEAST = np.float32(1e-6)  # length below which a vector has no direction


def keydiff(keys: NDArray[np.float32], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Score tokens by their keys, as cached and turned by their rotary positions: the negative cosine to their mean."""
    directions = directions_of(keys)
    mean = directions.mean(axis=0, keepdims=True)
    directions *= mean
    cosines: NDArray[np.float32] = directions.sum(axis=1) / (_lengths(mean)[0] + _LEAST)
    return -cosines


def directions_of(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return each vector with length one; vectors of no length have no direction and stay near zero."""
    directions: NDArray[np.float32] = vectors / (_lengths(vectors) + _LEAST)
    return directions


def _lengths(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths: NDArray[np.float32] = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    return lengths
