"""Quantises float weights to MLX's own formats, mxfp4 and nvfp4, by numpy alone: every machine writes the same."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.errors import Unsupported
from edgekit.formats.int_packing import pack_words
from edgekit_mlx.layout import MlxPacking

Floats = NDArray[np.float32]

_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)  # e2m1; the fourth bit is the sign
_FP4_EDGES = (_FP4[1:] + _FP4[:-1]) / 2
_E4M3 = np.array(
    [(code & 7) * 2.0**-9 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7) for code in range(127)],
    np.float32,
)


class QuantisedRows(NamedTuple):
    """Rows in the file's format."""

    words: NDArray[np.uint32]
    scales: NDArray[np.uint8]


FP4_MODES = ("mxfp4", "nvfp4")


def quantise(weights: Floats, packing: MlxPacking) -> QuantisedRows:
    """Quantise rows of float weights by `packing`."""
    if packing.mode not in FP4_MODES:
        raise Unsupported("mlx: floats are not rounded to affine integers here; choose small, balanced or s8")
    rows, inputs = weights.shape
    groups = np.ascontiguousarray(weights, np.float32).reshape(rows, inputs // packing.group, packing.group)
    return _mxfp4(groups) if packing.mode == "mxfp4" else _nvfp4(groups)


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
    return QuantisedRows(pack_words(codes.reshape(len(groups), -1), 4), scales)


def _nvfp4(groups: Floats) -> QuantisedRows:
    """Scale each group by an eight-bit float (e4m3): its largest value over 6, rounded to nearest."""
    exact = np.abs(groups).max(-1) / 6
    scales = np.searchsorted((_E4M3[1:] + _E4M3[:-1]) / 2, exact).astype(np.uint8)
    codes, _ = _fp4_codes(groups, _E4M3[scales])
    return QuantisedRows(pack_words(codes.reshape(len(groups), -1), 4), scales)


def fp4_values(codes: NDArray[np.uint8], scales: NDArray[np.uint8], mode: str) -> Floats:
    """Return the values of four-bit floats [rows, inputs], of which each group has a scale [rows, groups]."""
    steps = np.exp2(scales.astype(np.float32) - 127) if mode == "mxfp4" else _E4M3[scales]
    grouped = np.concatenate([_FP4, -_FP4])[codes].reshape(*scales.shape, -1)
    values: Floats = (grouped * steps[..., None]).astype(np.float32)
    return values
