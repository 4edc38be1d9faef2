"""Keys and values in 8 bits outside a program: each token of a head has a scale, and an integer that stands for zero.

Turning a key changes how far its channels reach, so a turned key is rounded anew, by a scale of its own. Knows nothing
of programs or states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.model import Layer
from edgekit.rotation import Turn, close_gap, turned
from edgekit.segments import Part
from edgekit_executorch.layout import NARROW_BITS

_LEAST, _MOST = -128, 127
_LEAST_SCALE = np.float32(np.finfo(np.float32).tiny)
_PIECE_TOKENS = 512


class Narrow(NamedTuple):
    """A run of tokens."""

    integers: NDArray[np.int8]  # [head, token, dim]
    scales: NDArray[np.float32]  # [head, token, 1]
    zeros: NDArray[np.int8]  # likewise


def parts_of(layer: Layer, kv_bits: int) -> list[Part]:
    """The arrays that a layer's keys, or its values, consist of."""
    heads, dim = layer.kv_heads, layer.head_dim
    if kv_bits != NARROW_BITS:
        return [Part(heads, dim, np.dtype(np.float32))]
    integers, floats = np.dtype(np.int8), np.dtype(np.float32)
    return [Part(heads, dim, integers), Part(heads, 1, floats), Part(heads, 1, integers)]


def form_of(kv_bits: int) -> str:
    """What a segment says of how it is held."""
    return "int8 by token" if kv_bits == NARROW_BITS else "float32"


def rounded(values: NDArray[np.float32]) -> Narrow:
    """Each token of a head by its own reach, in which zero always lies."""
    least = np.minimum(values.min(-1, keepdims=True), 0)
    most = np.maximum(values.max(-1, keepdims=True), 0)
    scales = np.maximum((most - least) * np.float32(1 / (_MOST - _LEAST)), _LEAST_SCALE)
    zeros = np.rint(_LEAST - least / scales).clip(_LEAST, _MOST)
    integers = (np.rint(values / scales) + zeros).clip(_LEAST, _MOST)
    return Narrow(integers.astype(np.int8), scales, zeros.astype(np.int8))


def widened(held: Narrow) -> NDArray[np.float32]:
    integers = held.integers.astype(np.float32)
    integers -= held.zeros
    integers *= held.scales
    return integers


def close(arrays: list[NDArray[Any]], start: int, stop: int, length: int, turn: Turn | None) -> None:
    """Drop tokens `start` to `stop` of `length` in the arrays of `parts_of`; keys come with a `turn`."""
    if turn is None or len(arrays) == 1:
        for array in arrays:
            close_gap(array, start, stop, length, turn)
        return
    for place in range(stop, length, _PIECE_TOKENS):
        moved = slice(place, min(length, place + _PIECE_TOKENS))
        target = slice(moved.start - stop + start, moved.stop - stop + start)
        found = rounded(turned(widened(Narrow(*(array[:, moved] for array in arrays))), turn))
        for array, new in zip(arrays, found, strict=True):
            array[:, target] = new
