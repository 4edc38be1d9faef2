"""Short convolutions in MLX: products and sums of shifted tokens. Also LFM2's gated form of them.

Each output is the same sum of products for any number of tokens in a call, so that results do not depend on chunks.
They are computed in float32, in which states carry the last inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

Product: TypeAlias = Callable[[str, mx.array], mx.array]  # with the matrix of a module, by its name
Other: TypeAlias = Callable[[str], mx.array]  # any other tensor, by its name


class Carry(NamedTuple):
    """The tokens that one state feeds to a recurrent layer, and the arrays that it has carried so far.

    The layer returns the arrays after the first `kept` tokens.
    """

    tokens: int
    kept: int
    arrays: tuple[mx.array, ...]


def gated_convolution(
    name: str, bias: bool, product: Product, other: Other, normed: mx.array, runs: Sequence[Carry]
) -> tuple[mx.array, list[tuple[mx.array, ...]]]:
    """Return the layer's output for all tokens, and the arrays that each state carries on."""
    before, after, inputs = mx.split(product(f"{name}in_proj", normed).astype(mx.float32), 3, axis=-1)
    mixed, last = convolved(f"{name}conv", other, before * inputs, runs)
    if bias:
        mixed = mixed + other(f"{name}conv.bias")
    return product(f"{name}out_proj", (after * mixed).astype(normed.dtype)), [(each,) for each in last]


def convolved(module: str, other: Other, inputs: mx.array, runs: Sequence[Carry]) -> tuple[mx.array, list[mx.array]]:
    """Convolve each channel of `inputs` [tokens, channels]; also return each state's last inputs.

    The first array that a state carries holds the inputs before its tokens.
    """
    weight = other(f"{module}.weight")
    before = weight.shape[-1] - 1
    firsts = list(accumulate((run.tokens for run in runs), initial=0))
    parts = [
        part
        for run, first in zip(runs, firsts, strict=False)
        for part in (run.arrays[0], inputs[first : first + run.tokens])
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
