"""The two kinds of scorers: by the keys and values in the cache, or by the attention that new tokens pay to old ones.

A scorer says what it needs, and an engine names the scorers whose needs it can meet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CACHE, ATTENTION = "keys and values", "attention"

Floats = NDArray[np.float32]


class ByCache(NamedTuple):
    """Scores the tokens of one head from their keys and values [token, head_dim]; a higher score is worth more."""

    score: Callable[[Floats, Floats], Floats]

    @property
    def needs(self) -> str:
        return CACHE


class ByAttention(NamedTuple):
    """Scores the tokens of one layer from the attention [head, token] that the newest tokens pay to each of them.

    `newest`: how many tokens are observed, at most those since the last eviction.
    """

    score: Callable[[Floats], Floats]
    newest: int

    @property
    def needs(self) -> str:
        return ATTENTION


Scorer = ByCache | ByAttention
