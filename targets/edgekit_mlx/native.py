"""Quantises float weights to MLX's own formats: affine of 3, 5 or 6 bits, mxfp4, nvfp4.

Scales are rounded to the file's type before the integers are chosen. It uses numpy alone, so every machine writes the
same bytes, with or without mlx.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit_mlx.layout import FloatType, MlxPacking, as_read, as_stored

Floats = NDArray[np.float32]

_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)  # e2m1; the fourth bit is the sign
_FP4_EDGES = (_FP4[1:] + _FP4[:-1]) / 2
_E4M3 = np.array(
    [(code & 7) * 2.0**-9 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7) for code in range(127)],
    np.float32,
)


class QuantisedRows(NamedTuple):
    """Rows in the file's format; `biases` is None if the mode has none."""

    words: NDArray[np.uint32]
    scales: NDArray[Any]
    biases: NDArray[Any] | None


FP4_MODES = ("mxfp4", "nvfp4")


def quantise(weights: Floats, packing: MlxPacking, floats: FloatType) -> QuantisedRows:
    """Quantise rows of float weights by `packing`; scales and biases of affine modes have the type `floats`."""
    rows, inputs = weights.shape
    groups = np.ascontiguousarray(weights, np.float32).reshape(rows, inputs // packing.group, packing.group)
    if packing.mode == "affine":
        return _affine(groups, packing.bits, floats)
    return _mxfp4(groups) if packing.mode == "mxfp4" else _nvfp4(groups)


def pack_words(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Pack unsigned values [rows, inputs] as a little-endian stream of `bits` bits each, in words."""
    stream = (values[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    packed = np.packbits(stream.reshape(len(values), -1), axis=-1, bitorder="little")
    return packed.view("<u4")


def _affine(groups: Floats, bits: int, floats: FloatType) -> QuantisedRows:
    """Quantise so that zero and the end of the range farther from zero are exact, up to the rounding of the scale."""
    steps = 2**bits - 1
    low, high = groups.min(-1), groups.max(-1)
    below = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / steps, 1e-7) * np.where(below, 1.0, -1.0)
    edge = np.where(below, low, high)
    at_zero = np.rint(edge / scale)
    scale = np.where(at_zero != 0, edge / np.where(at_zero == 0, 1.0, at_zero), scale)
    scales = as_stored(scale.astype(np.float32), floats)
    biases = as_stored(np.where(at_zero != 0, edge, 0.0).astype(np.float32), floats)
    step, origin = as_read(scales, floats)[..., None], as_read(biases, floats)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(step == 0, 0.0, np.rint((groups - origin) / step))
    rows = groups.shape[0]
    return QuantisedRows(pack_words(np.clip(values, 0, steps).astype(np.uint8).reshape(rows, -1), bits), scales, biases)


def _fp4_codes(groups: Floats, scale: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """Return the nearest four-bit floats of `groups / scale`, and their squared error."""
    with np.errstate(divide="ignore", invalid="ignore"):
        reduced = np.where(scale[..., None] == 0, np.float32(0), groups / scale[..., None])
    codes = np.searchsorted(_FP4_EDGES, np.abs(reduced)).astype(np.uint8)
    error: Floats = np.square(np.abs(groups) - _FP4[codes] * scale[..., None]).sum(-1)
    signs = np.where(np.signbit(reduced), np.uint8(8), np.uint8(0))
    return codes | signs, error


def _mxfp4(groups: Floats) -> QuantisedRows:
    """Scale each group by a power of two: of the two around its largest value over 6, the one with less error."""
    largest = np.maximum(np.abs(groups).max(-1), np.float32(2.0**-120)) / 6
    floor = np.floor(np.log2(largest))
    low, high = (
        (exponent, *_fp4_codes(groups, np.exp2(exponent).astype(np.float32))) for exponent in (floor, floor + 1)
    )
    is_better = high[2] < low[2]
    exponent = np.where(is_better, high[0], low[0])
    codes = np.where(is_better[..., None], high[1], low[1])
    scales = np.clip(exponent + 127, 0, 254).astype(np.uint8)
    return QuantisedRows(pack_words(codes.reshape(len(groups), -1), 4), scales, None)


def _nvfp4(groups: Floats) -> QuantisedRows:
    """Scale each group by an eight-bit float (e4m3): its largest value over 6, rounded to nearest."""
    exact = np.abs(groups).max(-1) / 6
    scales = np.searchsorted((_E4M3[1:] + _E4M3[:-1]) / 2, exact).astype(np.uint8)
    codes, _ = _fp4_codes(groups, _E4M3[scales])
    return QuantisedRows(pack_words(codes.reshape(len(groups), -1), 4), scales, None)


def fp4_values(codes: NDArray[np.uint8], scales: NDArray[np.uint8], mode: str) -> Floats:
    """Return the values of four-bit floats [rows, inputs], of which each group has a scale [rows, groups]."""
    steps = np.exp2(scales.astype(np.float32) - 127) if mode == "mxfp4" else _E4M3[scales]
    grouped = np.concatenate([_FP4, -_FP4])[codes].reshape(*scales.shape, -1)
    values: Floats = (grouped * steps[..., None]).astype(np.float32)
    return values
