"""The tensor types of GGUF: their sizes, and the conversion of their blocks to float32.

A type stores rows as whole blocks of 32 or 256 values; every function here takes blocks as rows of bytes and returns
their values, so that a file can be read a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edgekit.formats.int_packing import IntegerFormat, IntegerRows, bf16_to_float32

if TYPE_CHECKING:
    from numpy.typing import NDArray

    ByteArray = NDArray[np.uint8]
    Floats = NDArray[np.float32]

_QK, _QK_K = 32, 256


class GgufType(NamedTuple):
    """One tensor type: `values` of them are stored in one block of `bytes`."""

    name: str
    values: int
    bytes: int
    dequantise: Callable[[ByteArray], Floats] | None  # None: what `integers` reads is exact
    is_float: bool = False
    integer_format: IntegerFormat | None = None  # for types that `integers` reads
    integers: Callable[[ByteArray], IntegerRows] | None = None  # integers [n, values], scales and minima [n, groups]


def _halves(blocks: ByteArray, start: int) -> Floats:
    """Return the float16 at byte `start` of each block, as a column."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: ByteArray) -> ByteArray:
    """Unpack two values per byte: along the last axis, all low nibbles, then all high nibbles."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _high_bits(packed: ByteArray) -> ByteArray:
    """Return the 32 bits of a little-endian word, lowest first, as 0 or 16."""
    return np.unpackbits(packed, axis=-1, bitorder="little") * np.uint8(16)


def _floats(blocks: ByteArray, *, dtype: str) -> Floats:
    return blocks.view(dtype).astype(np.float32)


def _q5_0(blocks: ByteArray) -> Floats:
    values = _nibbles(blocks[:, 6:]) | _high_bits(blocks[:, 2:6])
    return _halves(blocks, 0) * (values.astype(np.float32) - 16)


def _q5_1(blocks: ByteArray) -> Floats:
    values = _nibbles(blocks[:, 8:]) | _high_bits(blocks[:, 4:8])
    return _halves(blocks, 0) * values.astype(np.float32) + _halves(blocks, 2)


def _crumbs(packed: ByteArray) -> ByteArray:
    """Unpack four 2-bit values per byte, from [n, 64] to [n, half, bit pair, 32], lowest bits first."""
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return (packed.reshape(len(packed), 2, 1, 32) >> shifts & 3).astype(np.uint8, copy=False)


def _q2_k(blocks: ByteArray) -> Floats:
    n = len(blocks)
    scales = blocks[:, :16]
    steps = (_halves(blocks, 80) * (scales & 15).astype(np.float32)).reshape(n, 16, 1)
    minima = (_halves(blocks, 82) * (scales >> 4).astype(np.float32)).reshape(n, 16, 1)
    values = _crumbs(blocks[:, 16:80]).reshape(n, 16, 16).astype(np.float32)
    return (steps * values - minima).reshape(n, _QK_K)


def _q3_k(blocks: ByteArray) -> Floats:
    n = len(blocks)
    packed = blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)
    high = (packed[:, 8:].reshape(n, 1, 4) >> shifts & 3).reshape(n, 16)
    scales = (low | high << 4).astype(np.float32) - 32
    # A set bit of the mask adds 4 to the value [half, crumb, l]: it is bit 4 * half + crumb of byte l.
    bits = np.unpackbits(blocks[:, :32], axis=1, bitorder="little").reshape(n, 32, 8)
    raised = bits.transpose(0, 2, 1).reshape(n, 2, 4, 32) << 2
    values = (_crumbs(blocks[:, 32:96]) | raised).reshape(n, 16, 16).astype(np.float32) - 4
    steps: Floats = (_halves(blocks, 108) * scales).reshape(n, 16, 1)
    return (steps * values).reshape(n, _QK_K)


def _six_bit_scales(packed: ByteArray) -> tuple[ByteArray, ByteArray]:
    """Unpack the eight scales and eight minima, six bits each, from the twelve bytes of Q4_K and Q5_K."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)
    return scales, minima


def _steps_and_lows(blocks: ByteArray) -> tuple[Floats, Floats]:
    """Return the steps and minima of the eight sub-blocks of Q4_K and Q5_K: a value is step * integer - minimum."""
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    return _halves(blocks, 0) * scales.astype(np.float32), _halves(blocks, 2) * minima.astype(np.float32)


def _with_minima(blocks: ByteArray, values: ByteArray) -> Floats:
    n = len(blocks)
    steps, lows = (each.reshape(n, 8, 1) for each in _steps_and_lows(blocks))
    return (steps * values.reshape(n, 8, 32).astype(np.float32) - lows).reshape(n, _QK_K)


def _q4_k(blocks: ByteArray) -> Floats:
    return _with_minima(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)))


def _q5_k(blocks: ByteArray) -> Floats:
    n = len(blocks)
    bits = np.unpackbits(blocks[:, 16:48], axis=1, bitorder="little").reshape(n, 32, 8).transpose(0, 2, 1)
    low = _nibbles(blocks[:, 48:].reshape(n, 4, 32)).reshape(n, 8, 32)
    return _with_minima(blocks, low | bits * np.uint8(16))


def _q6_k(blocks: ByteArray) -> Floats:
    n = len(blocks)
    low = _nibbles(blocks[:, :128].reshape(n, 2, 64)).reshape(n, 2, 4, 32)
    high = _crumbs(blocks[:, 128:192])
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    values = (low | high << 4).reshape(n, 16, 16).astype(np.float32) - 32
    return ((_halves(blocks, 208) * scales).reshape(n, 16, 1) * values).reshape(n, _QK_K)


_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _iq4_nl(blocks: ByteArray) -> Floats:
    return _halves(blocks, 0) * _IQ4[_nibbles(blocks[:, 2:])]


def _iq4_xs(blocks: ByteArray) -> Floats:
    n = len(blocks)
    shifts = np.arange(0, 16, 2, dtype=np.uint16).reshape(1, 8)
    high = (np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> shifts & 3).astype(np.uint8)
    packed = blocks[:, 4:8]
    low = np.stack([packed & 15, packed >> 4], axis=2).reshape(n, 8)
    scales = (low | high << 4).astype(np.float32) - 32
    values = _IQ4[_nibbles(blocks[:, 8:].reshape(n, 8, 16))]
    steps: Floats = (_halves(blocks, 0) * scales).reshape(n, 8, 1)
    return (steps * values).reshape(n, _QK_K)


# Twice the values of E2M1 floats; `_mxfp4` halves the block's power of two in return.
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _mxfp4(blocks: ByteArray) -> Floats:
    powers = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return powers * _E2M1[_nibbles(blocks[:, 1:])]


def _integers_q4_0(blocks: ByteArray) -> IntegerRows:
    """A scale may be negative or zero: its sign is chosen so that the value of largest magnitude is -8 × scale."""
    return IntegerRows(_nibbles(blocks[:, 2:]).astype(np.int8) - np.int8(8), _halves(blocks, 0))


def _integers_q4_1(blocks: ByteArray) -> IntegerRows:
    return IntegerRows(_nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _integers_q8_0(blocks: ByteArray) -> IntegerRows:
    return IntegerRows(blocks[:, 2:].view(np.int8), _halves(blocks, 0))


def _integers_q4_k(blocks: ByteArray) -> IntegerRows:
    """Scales and minima are products of two numbers, here rounded to float16."""
    values = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    steps, lows = (each.astype(np.float16).astype(np.float32) for each in _steps_and_lows(blocks))
    return IntegerRows(values, steps, -lows)


TYPES: dict[int, GgufType] = {
    0: GgufType("F32", 1, 4, partial(_floats, dtype="<f4"), is_float=True),
    1: GgufType("F16", 1, 2, partial(_floats, dtype="<f2"), is_float=True),
    2: GgufType("Q4_0", _QK, 18, None, False, IntegerFormat(4, _QK, "F16"), _integers_q4_0),
    3: GgufType("Q4_1", _QK, 20, None, False, IntegerFormat(4, _QK, "F16", minima=True), _integers_q4_1),
    6: GgufType("Q5_0", _QK, 22, _q5_0),
    7: GgufType("Q5_1", _QK, 24, _q5_1),
    8: GgufType("Q8_0", _QK, 34, None, False, IntegerFormat(8, _QK, "F16"), _integers_q8_0),
    10: GgufType("Q2_K", _QK_K, 84, _q2_k),
    11: GgufType("Q3_K", _QK_K, 110, _q3_k),
    12: GgufType("Q4_K", _QK_K, 144, _q4_k, False, IntegerFormat(4, _QK, "F16", minima=True), _integers_q4_k),
    13: GgufType("Q5_K", _QK_K, 176, _q5_k),
    14: GgufType("Q6_K", _QK_K, 210, _q6_k),
    20: GgufType("IQ4_NL", _QK, 18, _iq4_nl),
    23: GgufType("IQ4_XS", _QK_K, 136, _iq4_xs),
    28: GgufType("F64", 1, 8, partial(_floats, dtype="<f8"), is_float=True),
    30: GgufType("BF16", 1, 2, lambda blocks: bf16_to_float32(blocks.view("<u2")), is_float=True),
    39: GgufType("MXFP4", _QK, 17, _mxfp4),
}

# Unsupported types, with their names for messages.
REFUSED = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8",
    33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip


def dequantise(type_id: int, data: ByteArray, row_values: int) -> NDArray[np.float32]:
    """Return values [rows, row_values] as float32 from the bytes of whole rows.

    The result may hold NaN or infinity, which callers must refuse.
    """
    kind = TYPES[type_id]
    blocks = np.ascontiguousarray(data).reshape(-1, kind.bytes)
    with np.errstate(invalid="ignore", over="ignore"):
        values = kind.dequantise(blocks) if kind.dequantise else _integers(kind, blocks).dequantised()
    return values.reshape(-1, row_values)


def integers(type_id: int, data: ByteArray, row_values: int) -> IntegerRows:
    """Return the stored integers, scales and minima of whole rows, of a type with an `integer_format`.

    They may be infinite, which callers must refuse.
    """
    kind = TYPES[type_id]
    with np.errstate(invalid="ignore", over="ignore"):
        values, scales, minima = _integers(kind, np.ascontiguousarray(data).reshape(-1, kind.bytes))
    groups = (-1, row_values // _QK)
    minima = None if minima is None else minima.reshape(groups)
    return IntegerRows(values.reshape(-1, row_values), scales.reshape(groups), minima)


def _integers(kind: GgufType, blocks: ByteArray) -> IntegerRows:
    assert kind.integers is not None, kind.name
    return kind.integers(blocks)
