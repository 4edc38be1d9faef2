"""Converts llama.cpp's serialised form of a sequence to arrays of keys and values by token, and back.

llama.cpp checks only the magic number of such data, so it is given nothing but data composed by `encode`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.enginekit.kv_segment import SegmentPart
from edgekit.errors import TargetFailed
from edgekit.model.spec import ModelSpec
from edgekit.quant.neutral_gguf import row_order
from edgekit_llamacpp.capabilities import GGML_TYPES, QUANTISED_KV_HEADS

_FLOATS: dict[int, np.dtype[Any]] = {32: np.dtype("<f4"), 16: np.dtype("<f2")}
_BLOCK_BYTES = {8: 34, 4: 18}  # of 32 values


class KVLayout(NamedTuple):
    """The layout of one context: widths of a token's keys (and of its values) by layer, and their bits."""

    widths: tuple[int, ...]
    kv_bits: int
    transposed: bool  # values are stored as [width][token], as llama.cpp does without flash attention

    @property
    def dtype(self) -> np.dtype[Any]:
        return _FLOATS.get(self.kv_bits, np.dtype("u1"))

    def row_items(self, width: int) -> int:
        """Return the number of `dtype` items in a token's row."""
        return width if self.kv_bits >= 16 else width // 32 * _BLOCK_BYTES[self.kv_bits]

    def parts(self) -> list[SegmentPart]:
        """Return the arrays of a segment: the keys and the values of each layer."""
        return [SegmentPart(1, self.row_items(width), self.dtype) for width in self.widths for _ in ("key", "value")]


def decode(data: NDArray[np.uint8], layout: KVLayout, tokens: int) -> list[NDArray[Any]]:
    """Return keys and values of each layer in turn, [1, tokens, items], as copies."""
    cursor = _Cursor(data)
    cursor.skip_to_cells()
    cursor.expect("<I", tokens)
    for position in range(tokens):
        cursor.expect("<iI", position, 1)
        cursor.take(4)
    cursor.expect("<II", int(layout.transposed), len(layout.widths))
    cursor.take(8)
    keys = [_rows(cursor, layout, width, tokens) for width in layout.widths]
    read_values = _columns if layout.transposed else _rows
    values = [read_values(cursor, layout, width, tokens) for width in layout.widths]
    cursor.check_end()  # only the other sequences follow, which are empty here
    return [array for pair in zip(keys, values, strict=True) for array in pair]


def rounded(model: ModelSpec, kv_bits: int, kind: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return "keys" or "values" [kv_head, token, dim] as a cache gives them back: q8_0 or q4_0 of rotated heads."""
    if kv_bits >= 16:  # its attention reads 32 bits as 16: both give the same logits
        return values.astype(np.float16).astype(np.float32)
    dim = values.shape[-1]
    rows = row_order(model, "k_proj") if kind == "keys" else None
    order = np.arange(dim) if rows is None else rows[:dim]
    # llama.cpp rotates keys in the largest block of a power of two that divides the head, values in the least.
    size = dim & -dim if kind == "keys" else QUANTISED_KV_HEADS
    rotation = np.ones((1, 1), np.float32)
    while len(rotation) < size:
        rotation = np.block([[rotation, rotation], [rotation, -rotation]]) * np.float32(0.5**0.5)
    groups = (values[..., order].reshape(-1, size) @ rotation).reshape(-1, 32)
    largest = np.take_along_axis(groups, abs(groups).argmax(axis=1)[:, None], axis=1)
    steps = abs(largest) / 127 if kv_bits == 8 else largest / -8
    inverse = np.divide(1, steps, out=np.zeros_like(steps), where=steps != 0)
    integers = np.floor(groups * inverse + 0.5).clip(-127 if kv_bits == 8 else -8, 127 if kv_bits == 8 else 7)
    turned = (integers * steps.astype(np.float16)).astype(np.float32).reshape(-1, size)
    back: NDArray[np.float32] = (turned @ rotation).reshape(values.shape)[..., np.argsort(order)]
    return back


def encode(
    template: NDArray[np.uint8], layout: KVLayout, arrays: Sequence[NDArray[Any]], tokens: int
) -> NDArray[np.uint8]:
    """Compose the data of `tokens` tokens. `template`: data of a sequence of the same context with any tokens."""
    kind, per_item = GGML_TYPES[layout.kv_bits], layout.dtype.itemsize
    cursor = _Cursor(template)
    cursor.skip_to_cells()
    start = cursor.at
    (cells,) = struct.unpack("<I", bytes(cursor.take(4)))
    cursor.take(12 * cells)
    sizes = bytes(cursor.take(16))  # transposition, number of layers, and two sizes of llama.cpp's own
    parts = [bytes(template[:start]), struct.pack("<I", tokens)]
    parts += [struct.pack("<iIi", position, 1, 0) for position in range(tokens)]
    parts.append(sizes)
    for width, keys in zip(layout.widths, arrays[0::2], strict=True):
        parts += [struct.pack("<iQ", kind, layout.row_items(width) * per_item), keys.tobytes()]
    for width, values in zip(layout.widths, arrays[1::2], strict=True):
        if layout.transposed:
            parts += [struct.pack("<iII", kind, per_item, width), np.ascontiguousarray(values[0].T).tobytes()]
        else:
            parts += [struct.pack("<iQ", kind, layout.row_items(width) * per_item), values.tobytes()]
    (streams,) = struct.unpack("<I", bytes(template[8:12]))
    parts.append(bytes(4 * (streams - 1) - (start - 12)))
    return np.frombuffer(b"".join(parts), np.uint8)


def _rows(cursor: _Cursor, layout: KVLayout, width: int, tokens: int) -> NDArray[Any]:
    items = layout.row_items(width)
    cursor.expect("<iQ", GGML_TYPES[layout.kv_bits], items * layout.dtype.itemsize)
    return cursor.array(layout.dtype, tokens * items).reshape(1, tokens, items).copy()


def _columns(cursor: _Cursor, layout: KVLayout, width: int, tokens: int) -> NDArray[Any]:
    cursor.expect("<iII", GGML_TYPES[layout.kv_bits], layout.dtype.itemsize, width)
    return np.ascontiguousarray(cursor.array(layout.dtype, width * tokens).reshape(width, tokens).T)[None]


class _Cursor:
    """Reads the data in order. Unexpected data is an error, because other builds have other layouts."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data, self._at = data, 0

    @property
    def at(self) -> int:
        return self._at

    def skip_to_cells(self) -> None:
        """Skip the magic number, the sequence, the number of streams, and the streams of other sequences."""
        self.take(12)
        while not any(self._data[self._at : self._at + 4]):
            self.take(4)

    def take(self, count: int) -> NDArray[np.uint8]:
        if self._at + count > self._data.size:
            raise self._unknown("ends early")
        self._at += count
        return self._data[self._at - count : self._at]

    def expect(self, form: str, *wanted: int) -> None:
        start = self._at
        found = struct.unpack(form, bytes(self.take(struct.calcsize(form))))
        if found != wanted:
            raise self._unknown(f"holds {found} at byte {start}, expected {wanted}")

    def array(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        return np.frombuffer(self.take(count * dtype.itemsize).tobytes(), dtype)

    def check_end(self) -> None:
        if any(self._data[self._at :]):
            raise self._unknown(f"goes on after byte {self._at}")

    def _unknown(self, what: str) -> TargetFailed:
        return TargetFailed(f"llamacpp: the saved form of a sequence {what}; this build of llama.cpp is not supported")
