"""Finds the constants of a program's method in its file, in the order in which the method was traced.

ExecuTorch's own operators take constants from the program; parts delegated to XNNPACK have their own. A backend cuts
and orders parts freely, but every node carries its index in the traced method. Constants have no names.
"""

from __future__ import annotations

import mmap
import re
import struct
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.errors import DamagedArtifact, Unsupported
from edgekit.formats.int_packing import IntegerRows, bf16_to_float32, in_slices, unpack
from edgekit_executorch.delegated import DelegatedPart
from edgekit_executorch.flatbuffer import Flat
from edgekit_executorch.inspection import layout_of
from edgekit_executorch.stored import BITS, ByteRange, Constant, Linear, StoredKind, constant_at

Floats = NDArray[np.float32]

# Field numbers and kinds of program.fbs, and the header before a part of XNNPACK.
_PLANS, _INLINE, _SEGMENTS, _CONSTANTS, _NAMED = 1, 3, 4, 5, 7
_NAME, _VALUES, _CHAINS, _OPERATORS, _DELEGATES = 0, 2, 5, 6, 7
_IS_KERNEL, _IS_DELEGATE, _IS_TENSOR = 1, 2, 5
_SCALAR_TYPES: dict[int, StoredKind] = {6: "float32", 1: "int8"}
_LOOK_UPS = ("quantized_decomposed::embedding_byte", "aten::embedding")
_HEADER, _PART = struct.Struct("<4x4sHIIIQ"), b"XH00"
_ALIGNMENT = 128  # of segments
# XNNPACK's weights are named by their hash, and their scales too.
_SCALES, _STORED_NAME = "scale_", re.compile(rb"[0-9a-f]{64}")


class MethodConstants(NamedTuple):
    """Every constant that a method uses, each kind in the method's order."""

    tables: list[Constant]  # embeddings
    linears: list[Linear]
    factors: list[Constant]  # factors of elementwise products


class Constants:
    """The constants in a program's file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data = path, data
        self._flat, base = layout_of(path, data)
        program = self._program = self._flat.root()
        self._segments = [
            ByteRange(base + self._flat.number(segment, 0, "Q"), self._flat.number(segment, 1, "Q"))
            for segment in self._flat.tables(program, _SEGMENTS)
        ]
        self.named = {
            self._flat.text(entry, 0): self._segment(self._flat.number(entry, 1))
            for entry in self._flat.tables(program, _NAMED)
        }

    def starts(self) -> list[int]:
        """Return the offsets at which weights, each with its scales behind it, delegated parts and constants begin."""
        starts = {segment.start for segment in self._segments if segment.size}
        for (_, weights), (name, scales) in pairwise(self.named.items()):
            if name.startswith(_SCALES) and 0 <= scales.start - weights.start - weights.size < _ALIGNMENT:
                starts.discard(scales.start)
        constants = self._flat.table(self._program, _CONSTANTS)
        if constants is not None:
            segment = self._segment(self._flat.number(constants, 0))
            starts |= {segment.start + offset for offset in self._flat.numbers(constants, 1, "Q")}
        return sorted(starts)

    def names_end(self, start: int, stop: int) -> int:
        """Return the offset behind the last name of a weight in a range of bytes; `start` if it has none."""
        ends = (match.end() for match in _STORED_NAME.finditer(self._data, start, stop))
        return max(ends, default=start)

    def is_part(self, start: int) -> bool:
        """Return True if a part that was delegated to XNNPACK begins at an offset."""
        return self._data[start + 4 : start + 4 + len(_PART)] == _PART

    @property
    def methods(self) -> frozenset[str]:
        """The names of the program's methods."""
        return frozenset(self._flat.text(plan, _NAME) for plan in self._flat.tables(self._program, _PLANS))

    def used_by(self, method: str) -> MethodConstants:
        """Return the constants of a method. Raises `Unsupported` for parts of other backends than XNNPACK."""
        for plan in self._flat.tables(self._program, _PLANS):
            if self._flat.text(plan, _NAME) == method:
                return self._used(plan)
        raise DamagedArtifact(f"{self._path}: has no method {method}; export it again")

    def floats(self, constant: Constant) -> Floats:
        """Return a dequantised copy of a constant."""
        raw = np.frombuffer(self._bytes(constant.values), np.uint8)
        if constant.kind == "float32":
            return raw.view("<f4").reshape(constant.shape).astype(np.float32)
        packed, scales = raw.reshape(constant.shape[0], -1), self._scales(constant)
        bits, inputs = BITS[constant.kind], constant.shape[1]

        def dequantised(rows: slice) -> Floats:
            # XNNPACK stores four-bit integers with an offset; eight-bit ones have none.
            integers = unpack(packed[rows], bits, inputs) if bits == 4 else packed[rows].view(np.int8)
            return IntegerRows(integers, scales[rows]).dequantised()

        return in_slices(np.empty((len(packed), inputs), np.float32), dequantised)

    def _scales(self, constant: Constant) -> Floats:
        """Return the scales of each row's groups."""
        assert constant.scales is not None
        raw = self._bytes(constant.scales)
        if constant.group is None:
            return np.frombuffer(raw, "<f4").astype(np.float32).reshape(-1, 1)
        return bf16_to_float32(np.frombuffer(raw, "<u2")).reshape(constant.shape[0], -1)

    def _used(self, plan: int) -> MethodConstants:
        flat = self._flat
        values, delegates = list(flat.tables(plan, _VALUES)), list(flat.tables(plan, _DELEGATES))
        names = [flat.text(operator, 0) for operator in flat.tables(plan, _OPERATORS)]
        tables: list[Constant] = []
        parts: list[DelegatedPart] = []
        for chain in flat.tables(plan, _CHAINS):
            for instruction in flat.tables(chain, 2):
                kind, call = flat.union(instruction, 0) or (0, 0)
                if kind not in (_IS_KERNEL, _IS_DELEGATE):
                    continue
                index, given = flat.number(call, 0, "i"), flat.numbers(call, 1, "i")
                if kind == _IS_DELEGATE:
                    parts.append(self._part(delegates[index], [self._own(values[value]) for value in given]))
                elif names[index] in _LOOK_UPS:
                    table, scales = (self._own(values[value]) for value in given[:2])
                    if table is not None:
                        tables.append(table._replace(scales=scales.values if scales else None))
        linears = sorted((each for part in parts for each in part.linears()), key=lambda each: each[0])
        factors = sorted((each for part in parts for each in part.factors()), key=lambda each: each[0])
        return MethodConstants(tables, [linear for _, linear in linears], [factor for _, factor in factors])

    def _own(self, value: int) -> Constant | None:
        """Return one of the program's values as a constant; None if it is computed."""
        flat = self._flat
        kind, tensor = flat.union(value, 0) or (0, 0)
        if kind != _IS_TENSOR:
            return None
        buffer, scalar = flat.number(tensor, 5), flat.number(tensor, 0, "b")
        if not buffer or flat.table(tensor, 6) is not None or scalar not in _SCALAR_TYPES:
            return None
        shape = flat.numbers(tensor, 2, "i")
        constants = flat.table(self._program, _CONSTANTS)
        if constants is None:
            raise ValueError("a constant in a program without constants")
        segment = self._segment(flat.number(constants, 0))
        offset = flat.numbers(constants, 1, "Q")[buffer]
        return constant_at(shape, _SCALAR_TYPES[scalar], ByteRange(segment.start + offset, segment.size - offset))

    def _part(self, delegate: int, given: list[Constant | None]) -> DelegatedPart:
        """Read a part delegated to XNNPACK. `given`: its arguments, None for computed ones."""
        backend = self._flat.text(delegate, 0)
        if backend != "XnnpackBackend":
            raise Unsupported(f"executorch: the weights within a part of {backend} are in that vendor's own format")
        blob = self._blob(delegate)
        magic, _, start, size, _, _ = _HEADER.unpack_from(self._bytes(ByteRange(blob.start, _HEADER.size)))
        if magic != _PART or start + size > blob.size:
            raise ValueError("a part of XNNPACK without its header")
        return DelegatedPart(Flat(self._data, blob.start + start, blob.start + start + size), self.named, given)

    def _blob(self, delegate: int) -> ByteRange:
        reference = self._flat.table(delegate, 1)
        if reference is None:
            raise ValueError("a part without data")
        in_segment, index = self._flat.number(reference, 0, "b"), self._flat.number(reference, 1)
        if in_segment:
            return self._segment(index)
        inline = list(self._flat.tables(self._program, _INLINE))[index]
        return ByteRange(*self._flat.span(inline, 0))

    def _segment(self, index: int) -> ByteRange:
        if index >= len(self._segments):
            raise ValueError("a segment that is not there")
        return self._segments[index]

    def _bytes(self, place: ByteRange) -> bytes:
        if place.start < 0 or place.start + place.size > len(self._data):
            raise ValueError("a segment leads out of the file")
        return self._data[place.start : place.start + place.size]
