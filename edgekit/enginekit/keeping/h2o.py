"""H2O (arXiv 2306.14048): a token is worth the attention that it got from all tokens since it is cached.

Attention is observed when the window is full: that of every token since the last eviction, or of the last block before
the first one. So each token is counted once, wherever chunks, drafts or restarts cut the text.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgekit.enginekit.keeping.scorer import ByAttention


def h2o(attention: NDArray[np.float32]) -> NDArray[np.float32]:
    """Score tokens by the mean attention of all heads."""
    mean: NDArray[np.float32] = attention.mean(axis=0)
    return mean


H2O = ByAttention(h2o, newest=64, adds_up=True)  # a block has at most 64 tokens
