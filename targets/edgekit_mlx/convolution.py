"""Short convolutions in MLX: products and sums of shifted tokens.

Each output is the same sum of products for any number of tokens in a call, so that results do not depend on chunks.
They are computed in float32, in which states carry the last inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import numpy as np


class Carry(NamedTuple):
    """The tokens that one state feeds to a recurrent layer, and the array that it has carried so far.

    The layer returns the array after the first `kept` tokens.
    """

    tokens: int
    kept: int
    array: mx.array


def convolved(weight: mx.array, inputs: mx.array, runs: Sequence[Carry]) -> tuple[mx.array, list[mx.array]]:
    """Convolve each channel of `inputs` [tokens, channels]; also return each state's last inputs.

    The array that a state carries holds the inputs before its tokens.
    """
    before = weight.shape[-1] - 1
    firsts = list(accumulate((run.tokens for run in runs), initial=0))
    parts = [
        part
        for run, first in zip(runs, firsts, strict=False)
        for part in (run.array, inputs[first : first + run.tokens])
    ]
    seen = mx.concatenate(parts)
    starts = [first + index * before for index, first in enumerate(firsts[:-1])]
    last = [
        mx.contiguous(seen[start + run.kept : start + run.kept + before])
        for run, start in zip(runs, starts, strict=True)
    ]
    # Also of windows that reach from one state's tokens to the next state's; they are left out below.
    windows = len(seen) - before
    mixed = seen[:windows] * weight[:, 0, 0]  # the oldest input first
    for tap in range(1, before + 1):
        mixed = mixed + seen[tap : tap + windows] * weight[:, 0, tap]
    # MLX would otherwise copy the last inputs after all layers, and hold every layer's inputs until then.
    mixed = mx.depends([mixed], last)[0]
    if len(runs) > 1:
        rows = [np.arange(start, start + run.tokens) for run, start in zip(runs, starts, strict=True)]
        mixed = mixed[mx.array(np.concatenate(rows))]
    return mixed, last
