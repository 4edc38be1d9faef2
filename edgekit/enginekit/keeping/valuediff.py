"""KeyDiff's measure on values: a token is worth more the less its value points where all values point."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgekit.enginekit.keeping.keydiff import apart


def valuediff(keys: NDArray[np.float32], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Score tokens by their values, which no rotary position has turned."""
    return apart(values)
