"""Novelty: a token is worth more the less its value lies along the newest values, and a little more the newer it is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgekit.enginekit.keeping.keydiff import directions_of

AGE = 0.5  # deviations by which the newest token is ahead of the oldest of equal novelty


def novelty(keys: NDArray[np.float32], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Score tokens by their values, which no rotary position has turned, against the newer half of them.

    The newer half is what the text is about. Against all cached values, tokens that were kept before would count again
    and again.
    """
    ahead = directions_of(values[len(values) // 2 :]).mean(axis=0, keepdims=True)
    along: NDArray[np.float32] = (values * directions_of(ahead)).sum(axis=1)
    newer = np.linspace(0, AGE, len(values), dtype=np.float32)
    return newer - along / (along.std() + np.float32(1e-9))
