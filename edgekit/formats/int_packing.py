"""4-bit and 8-bit integers as bytes: value + 8 or + 128, low nibble first, rows padded to four bytes.

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
    """The integer format of a matrix that another tool quantised: integer × scale, without zero points."""

    bits: int
    group: int | None  # values of a row that share a scale; None: the whole row
    scales: ScaleType


class IntegerRows(NamedTuple):
    """Rows of a packed matrix, unpacked: integers [rows, in] and float32 scales [rows, in/group]."""

    integers: NDArray[np.int8]
    scales: NDArray[np.float32]

    def dequantised(self) -> NDArray[np.float32]:
        """Return integer × scale in float32."""
        rows, inputs = self.integers.shape
        values = self.integers.astype(np.float32).reshape(*self.scales.shape, -1)
        values *= self.scales[:, :, None]
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
    """Pack `values` [out, in] in [-2^(bits-1), 2^(bits-1)) to bytes [out, row_bytes]; the padding is zero."""
    assert bits in (4, 8) and values.ndim == 2, (bits, values.shape)
    return pack_s4(values) if bits == 4 else pack_s8(values)


def unpack(packed: NDArray[np.uint8], bits: int, inputs: int) -> NDArray[np.int8]:
    """Unpack bytes to values [out, in], the exact inverse of `pack`."""
    assert bits in (4, 8) and packed.ndim == 2, (bits, packed.shape)
    return unpack_s4(packed, inputs) if bits == 4 else unpack_s8(packed, inputs)


def pack_s4(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Pack values in [-8, 7], two to a byte."""
    rows, inputs = values.shape
    assert values.size == 0 or (values.min() >= -8 and values.max() <= 7), "an S4 value outside [-8, 7]"
    if inputs % 2:
        raised = np.zeros((rows, inputs + 1), np.uint8)
        np.add(values, 8, out=raised[:, :inputs], casting="unsafe")
    else:
        raised = (values + 8).astype(np.uint8, copy=False)
    packed = np.zeros((rows, row_bytes(inputs, 4)), np.uint8)
    np.bitwise_or(raised[:, 0::2], raised[:, 1::2] << 4, out=packed[:, : raised.shape[1] // 2])
    return packed


def unpack_s4(packed: NDArray[np.uint8], inputs: int) -> NDArray[np.int8]:
    """Unpack values in [-8, 7]."""
    values = np.empty((packed.shape[0], packed.shape[1] * 2), np.int8)
    np.bitwise_and(packed, 15, out=values[:, 0::2], casting="unsafe")
    np.right_shift(packed, 4, out=values[:, 1::2], casting="unsafe")
    values -= 8
    return values[:, :inputs]


def pack_s8(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Pack values in [-128, 127], one to a byte."""
    rows, inputs = values.shape
    assert values.size == 0 or (values.min() >= -128 and values.max() <= 127), "an S8 value outside [-128, 127]"
    packed = np.zeros((rows, row_bytes(inputs, 8)), np.uint8)
    np.bitwise_xor(values.astype(np.int8, copy=False).view(np.uint8), 128, out=packed[:, :inputs])
    return packed


def unpack_s8(packed: NDArray[np.uint8], inputs: int) -> NDArray[np.int8]:
    """Unpack values in [-128, 127]."""
    return (packed[:, :inputs] ^ 128).view(np.int8)


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
