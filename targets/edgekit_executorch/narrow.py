"""Keys and values in 8 bits outside a program: whole numbers, with a scale for each token of a head.

Turning a key changes how far its channels reach, so a turned key is rounded anew, with a scale of its own. Knows
nothing of programs or states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.model import Layer
from edgekit.rotation import Turn, close_gap, turned
from edgekit.segments import Part
from edgekit_executorch.layout import NARROW_BITS

_LARGEST = 127
_LEAST_SCALE = np.float32(1e-12)
_PIECE_TOKENS = 512


class Rounded(NamedTuple):
    """Whole numbers [head, token, dim] and their scales [head, token, 1]."""

    integers: NDArray[np.int8]
    scales: NDArray[np.float32]


def parts_of(layer: Layer, kv_bits: int) -> list[Part]:
    """The arrays that a layer's keys, or its values, consist of."""
    heads, dim = layer.kv_heads, layer.head_dim
    if kv_bits != NARROW_BITS:
        return [Part(heads, dim, np.dtype(np.float32))]
    return [Part(heads, dim, np.dtype(np.int8)), Part(heads, 1, np.dtype(np.float32))]


def form_of(kv_bits: int) -> str:
    """What a segment says of how it is held."""
    return "int8 by token" if kv_bits == NARROW_BITS else "float32"


def rounded(values: NDArray[np.float32]) -> Rounded:
    """As a program rounds what it writes."""
    scales = np.maximum(np.abs(values).max(-1, keepdims=True), _LEAST_SCALE) * np.float32(1 / _LARGEST)
    return Rounded(np.rint(values / scales).astype(np.int8), scales)


def close(arrays: list[NDArray[Any]], start: int, stop: int, length: int, turn: Turn | None) -> None:
    """Drop tokens `start` to `stop` of `length` in the arrays of `parts_of`; keys come with a `turn`."""
    if turn is None or len(arrays) == 1:
        for array in arrays:
            close_gap(array, start, stop, length, turn)
        return
    integers, scales = arrays
    for place in range(stop, length, _PIECE_TOKENS):
        moved = slice(place, min(length, place + _PIECE_TOKENS))
        target = slice(moved.start - stop + start, moved.stop - stop + start)
        wide = integers[:, moved] * scales[:, moved]
        integers[:, target], scales[:, target] = rounded(turned(wide, turn))
