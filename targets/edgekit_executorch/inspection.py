"""Reads a program's methods, operators, backends and planned memory from its file alone.

Every offset is checked, so that a damaged or foreign file is refused before any vendor code reads it.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

from edgekit.errors import DamagedArtifact, Unsupported, quote_short
from edgekit_executorch.flatbuffer import Flat, sound

_HEADER = struct.Struct("<4sIQQQ")  # magic, length, size of the program, offset and size of the segments
SEGMENTS_SIZE_AT = 8 + 24  # the offset in the file of the last field of that header
_FORMAT, _EXTENDED = b"ET12", b"eh00"
# Field numbers of ExecuTorch's schema, program.fbs.
_PROGRAM_PLANS = 1
_PLAN_NAME, _PLAN_OPERATORS, _PLAN_DELEGATES, _PLAN_ARENAS = 0, 6, 7, 8
_OPERATOR_NAME, _OPERATOR_OVERLOAD, _DELEGATE_ID = 0, 1, 0


class Contents(NamedTuple):
    """The contents of a program's file."""

    bytes: int
    methods: tuple[str, ...]
    delegates: frozenset[str]  # backends that parts were delegated to
    operators: frozenset[str]  # operators outside delegated parts
    arenas: dict[str, tuple[int, ...]]  # bytes of each planned arena, by method


class Layout(NamedTuple):
    """The tables of a file, and the base of its segments."""

    flat: Flat
    segments: int  # the offset from which segments count


def read_contents(path: Path) -> Contents:
    """Read the program at `path`. Raises `DamagedArtifact`, or `Unsupported` for another file format."""
    with sound(path) as data:
        return _read(path, data)


def layout_of(path: Path, data: mmap.mmap) -> Layout:
    """Check a program's header, and find its tables and segments."""
    size = len(data)
    if size < 40 or data[4:6] != b"ET":
        raise DamagedArtifact(f"{path}: is not an ExecuTorch program; export or copy it again")
    if data[4:8] != _FORMAT:
        raise Unsupported(
            f"{path}: is in ExecuTorch's file format {quote_short(data[4:8].decode('latin-1'))}, this edgekit reads "
            f"{_FORMAT.decode()}; export it again here"
        )
    end, segments = size, size
    if data[8:12] == _EXTENDED:
        _, length, end, segments, segments_size = _HEADER.unpack_from(data, 8)
        if not 40 <= end <= size or segments + (segments_size if length >= _HEADER.size else 0) > size:
            raise DamagedArtifact(f"{path}: is cut short: its header asks for more bytes than the {size:,} there are")
    return Layout(Flat(data, 0, end), segments)


def _read(path: Path, data: mmap.mmap) -> Contents:
    flat = layout_of(path, data).flat
    program = flat.root()
    methods, delegates, operators, arenas = [], set(), set(), {}
    for plan in flat.tables(program, _PROGRAM_PLANS):
        name = flat.text(plan, _PLAN_NAME)
        methods.append(name)
        arenas[name] = flat.numbers(plan, _PLAN_ARENAS)[1:]  # the first is a placeholder of the format
        delegates |= {flat.text(delegate, _DELEGATE_ID) for delegate in flat.tables(plan, _PLAN_DELEGATES)}
        operators |= {
            f"{flat.text(operator, _OPERATOR_NAME)}.{flat.text(operator, _OPERATOR_OVERLOAD)}".rstrip(".")
            for operator in flat.tables(plan, _PLAN_OPERATORS)
        }
    return Contents(len(data), tuple(methods), frozenset(delegates), frozenset(operators), arenas)
