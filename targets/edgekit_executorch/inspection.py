"""Reads what a program holds from its file alone: methods, operators, backends, and the memory that it plans.

The file is a flatbuffer, read here field by field with every offset checked, so that a damaged or foreign file is
refused before any vendor code sees it. Knows no vendor library.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

from edgekit.errors import DamagedArtifact, Unsupported, clip
from edgekit_executorch.flatbuffer import Flat, sound

_HEADER = struct.Struct("<4sIQQQ")  # magic, length, size of the program, offset and size of the segments
_FORMAT, _EXTENDED = b"ET12", b"eh00"
# Field numbers of ExecuTorch's schema, program.fbs.
_PROGRAM_VERSION, _PROGRAM_PLANS = 0, 1
_PLAN_NAME, _PLAN_OPERATORS, _PLAN_DELEGATES, _PLAN_ARENAS = 0, 6, 7, 8
_OPERATOR_NAME, _OPERATOR_OVERLOAD, _DELEGATE_ID = 0, 1, 0


class Contents(NamedTuple):
    """What a program's file says."""

    bytes: int
    methods: tuple[str, ...]
    delegates: frozenset[str]  # backends that parts were handed to
    operators: frozenset[str]  # that run outside of them
    arenas: dict[str, tuple[int, ...]]  # method → bytes of each planned arena

    @property
    def arena_bytes(self) -> int:
        """All planned arenas: methods share theirs, so each is as large as the largest asks."""
        columns = max((len(sizes) for sizes in self.arenas.values()), default=0)
        return sum(
            max((sizes[column] for sizes in self.arenas.values() if column < len(sizes)), default=0)
            for column in range(columns)
        )


class Layout(NamedTuple):
    """Where a file keeps what."""

    flat: Flat
    segments: int  # where they begin; their own offsets count from there


def read_contents(path: Path) -> Contents:
    """What the program at `path` holds; refused unless its structure is sound."""
    with sound(path) as data:
        return _read(path, data)


def layout_of(path: Path, data: mmap.mmap) -> Layout:
    """The tables of a program, and where its segments stand."""
    size = len(data)
    if size < 40 or data[4:6] != b"ET":
        raise DamagedArtifact(f"{path}: is not an ExecuTorch program; export or copy it again")
    if data[4:8] != _FORMAT:
        raise Unsupported(
            f"{path}: is in ExecuTorch's file format {clip(data[4:8].decode('latin-1'))}, this edgekit reads "
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
