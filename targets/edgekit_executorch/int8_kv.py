"""Keys and values in 8 bits outside a program: each token of a head has its own scale and zero point.

Rotating a key changes the range of its channels, so a rotated key is quantised again with a new scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.enginekit.kv_segment import SegmentPart
from edgekit.enginekit.rope_shift import RopeRotation, rotate_keys, shift_kv
from edgekit.model.parts import Layer
from edgekit_executorch.layout import INT8_BITS

_LEAST, _MOST = -128, 127
_LEAST_SCALE = np.float32(np.finfo(np.float32).tiny)
_PIECE_TOKENS = 512


class Int8KV(NamedTuple):
    """Quantised keys or values of a run of tokens."""

    integers: NDArray[np.int8]  # [head, token, dim]
    scales: NDArray[np.float32]  # [head, token, 1]
    zeros: NDArray[np.int8]  # [head, token, 1]


def parts_of(layer: Layer, kv_bits: int) -> list[SegmentPart]:
    """Return the arrays that a layer's keys need; its values need the same."""
    heads, dim = layer.kv_heads, layer.head_dim
    if kv_bits != INT8_BITS:
        return [SegmentPart(heads, dim, np.dtype(np.float32))]
    integers, floats = np.dtype(np.int8), np.dtype(np.float32)
    return [SegmentPart(heads, dim, integers), SegmentPart(heads, 1, floats), SegmentPart(heads, 1, integers)]


def form_of(kv_bits: int) -> str:
    """Return the name of the representation that segments state."""
    return "int8 by token" if kv_bits == INT8_BITS else "float32"


def quantise(values: NDArray[np.float32]) -> Int8KV:
    """Quantise each token of a head by its own range, extended to contain zero."""
    least = np.minimum(values.min(-1, keepdims=True), 0)
    most = np.maximum(values.max(-1, keepdims=True), 0)
    scales = np.maximum((most - least) * np.float32(1 / (_MOST - _LEAST)), _LEAST_SCALE)
    zeros = np.rint(_LEAST - least / scales).clip(_LEAST, _MOST)
    integers = (np.rint(values / scales) + zeros).clip(_LEAST, _MOST)
    return Int8KV(integers.astype(np.int8), scales, zeros.astype(np.int8))


def dequantise(stored: Int8KV) -> NDArray[np.float32]:
    values = stored.integers.astype(np.float32)
    values -= stored.zeros
    values *= stored.scales
    return values


def rounded(values: NDArray[np.float32], kv_bits: int) -> NDArray[np.float32]:
    """Return keys or values [head, token, dim] as a cache of `kv_bits` bits gives them back."""
    if kv_bits == INT8_BITS:
        return dequantise(quantise(values))
    return values.astype(np.float16).astype(np.float32) if kv_bits == 16 else values


def close_gap(arrays: list[NDArray[Any]], start: int, stop: int, length: int, rotation: RopeRotation | None) -> None:
    """Drop tokens `start` to `stop` of `length` from the arrays of `parts_of`; `rotation` is None for values."""
    if rotation is None or len(arrays) == 1:
        for array in arrays:
            shift_kv(array, start, stop, length, rotation)
        return
    for first in range(stop, length, _PIECE_TOKENS):
        source = slice(first, min(length, first + _PIECE_TOKENS))
        target = slice(source.start - stop + start, source.stop - stop + start)
        keys = rotate_keys(dequantise(Int8KV(*(array[:, source] for array in arrays))), rotation)
        for array, moved in zip(arrays, quantise(keys), strict=True):
            array[:, target] = moved
