"""Integers of 3, 4 and 8 bits as bytes: value + 4, + 8 or + 128, low bits first, rows padded to four bytes.

These are the bytes of `weight_packed`, of MLX affine weights and of MatMulNBits, without scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

WORD = 4  # rows are stored as 32-bit words
GROUPS = (128, 64, 32)  # values that may share a scale
ScaleType = Literal["BF16", "F16", "F32"]


class IntegerFormat(NamedTuple):
    """The integer format of a matrix that another tool quantised: integer × scale, or that plus a minimum."""

    bits: int
    group: int | None  # values of a row that share a scale; None: the whole row
    scales: ScaleType  # of minima too
    minima: bool = False


class DerivedEntry(NamedTuple):
    """A tensor that is made from stored ones: the name of their type, its own shape, and their bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


class IntegerRows(NamedTuple):
    """Rows of a packed matrix, unpacked: integers [rows, in] and float32 scales [rows, in/group].

    Integers are unsigned where groups have minima, which are added: the values of the integer 0.
    """

    integers: NDArray[np.int8] | NDArray[np.uint8]
    scales: NDArray[np.float32]
    minima: NDArray[np.float32] | None = None

    def dequantised(self) -> NDArray[np.float32]:
        """Return integer × scale, plus the minimum, in float32."""
        rows, inputs = self.integers.shape
        values = self.integers.astype(np.float32).reshape(*self.scales.shape, -1)
        values *= self.scales[:, :, None]
        if self.minima is not None:
            values += self.minima[:, :, None]
        return values.reshape(rows, inputs)


def row_slices(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yield all rows of a matrix in slices of about 4 MiB of float32."""
    rows, *rest = shape
    step = max(1, (1 << 20) // max(1, math.prod(rest)))
    return (slice(start, min(rows, start + step)) for start in range(0, rows, step))


def in_slices(whole: NDArray[np.float32], read: Callable[[slice], NDArray[np.float32]]) -> NDArray[np.float32]:
    """Fill a matrix, of which `read` gives some rows at a time, so that what it computes in between stays small."""
    for rows in row_slices(whole.shape):
        whole[rows] = read(rows)
    return whole


def held_group(bits: int, group: int, inputs: int) -> int | None:
    """Return the group size with which neutral weights store packed rows without rounding.

    Groups above 128 are split, and their scale is repeated. None: one scale per row, only with 8 bits. Raises
    `ValueError` if no group of 32, 64 or 128 divides the given one.
    """
    if bits == 8 and group == inputs:
        return None
    for held in GROUPS:
        if group % held == 0:
            return held
    raise ValueError(f"one scale for each {group} values; {bits} bits are held in groups that 32 divides")


def row_bytes(inputs: int, bits: int) -> int:
    """Return the stored bytes of a row of `inputs` values."""
    return -(-inputs * bits // (8 * WORD)) * WORD


def pack(values: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Pack `values` [out, in] in [-2^(bits-1), 2^(bits-1)) to bytes [out, row_bytes]; the padding is zero.

    Unsigned values are packed as they are.
    """
    half, (rows, inputs) = 0 if values.dtype == np.uint8 else 1 << (bits - 1), values.shape
    is_held = values.size == 0 or (values.min() >= -half and values.max() < (1 << bits) - half)
    assert bits in (3, 4, 8) and is_held, f"a value outside {bits} bits"
    raised = np.zeros((rows, -(-inputs // 32) * 32), np.uint8)
    unsigned = values if half == 0 else values.astype(np.int8, copy=False).view(np.uint8)
    np.add(unsigned, np.uint8(half), out=raised[:, :inputs])
    if bits == 4:
        raised = np.bitwise_or(raised[:, 0::2], raised[:, 1::2] << 4)
    elif bits == 3:
        raised = pack_words(raised, 3).view(np.uint8)
    return np.ascontiguousarray(raised[:, : row_bytes(inputs, bits)])


def unpack(packed: NDArray[np.uint8], bits: int, inputs: int) -> NDArray[np.int8]:
    """Unpack bytes to values [out, in], the exact inverse of `pack`."""
    return (unpack_unsigned(packed, bits, inputs) - np.uint8(1 << (bits - 1))).view(np.int8)


def unpack_unsigned(packed: NDArray[np.uint8], bits: int, inputs: int) -> NDArray[np.uint8]:
    """Unpack bytes to unsigned values [out, in], from 0 to 2^bits - 1."""
    assert bits in (3, 4, 8) and packed.ndim == 2, (bits, packed.shape)
    raised = packed
    if bits == 4:
        raised = np.empty((packed.shape[0], packed.shape[1] * 2), np.uint8)
        np.bitwise_and(packed, 15, out=raised[:, 0::2])
        np.right_shift(packed, 4, out=raised[:, 1::2])
    elif bits == 3:
        raised = unpack_words(packed, 3)
    return raised[:, :inputs]


def pack_words(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Pack unsigned values [rows, inputs], whose bits fill words, as a little-endian stream of `bits` bits each."""
    stream = (values[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(stream.reshape(len(values), values.shape[1] * bits), axis=-1, bitorder="little").view("<u4")


def unpack_words(packed: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Return the unsigned values of rows from `pack_words`, as words or as bytes."""
    stream = np.unpackbits(np.ascontiguousarray(packed).view(np.uint8), axis=1, bitorder="little")
    count = stream.shape[1] // bits
    return np.packbits(stream[:, : count * bits].reshape(len(packed), count, bits), axis=-1, bitorder="little")[..., 0]


def bf16_to_float32(stored: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Convert bfloat16 bits to float32, exactly."""
    wide = stored.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def float32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Convert float32 to bfloat16 bits, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
