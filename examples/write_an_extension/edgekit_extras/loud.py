"""`--keep loud`: a full window keeps the tokens with the largest values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgekit.enginekit.keeping.scorer import ByCache


def loud(keys: NDArray[np.float32], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Score the tokens of one head by the length of their values."""
    lengths: NDArray[np.float32] = np.sqrt(np.square(values).sum(axis=1))
    return lengths


LOUD = ByCache(loud)
