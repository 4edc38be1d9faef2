"""Reads what a program holds from its file alone: methods, operators, backends, and the memory that it plans.

The file is a flatbuffer, read here field by field with every offset checked, so that a damaged or foreign file is
refused before any vendor code sees it. Knows no vendor library.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from edgekit.errors import DamagedArtifact, InvalidInput, LimitExceeded

_HEADER = struct.Struct("<4sIQQ")  # magic, length, size of the program, offset of the segments
_MAX_NAMES = 4096
_EXTENDED = b"eh00"
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


def read_contents(path: Path) -> Contents:
    """What the program at `path` holds; refused unless its structure is sound."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, data)
    except FileNotFoundError as error:
        raise InvalidInput(f"{path}: is missing; export the artifact again") from error
    except (OSError, ValueError, struct.error, IndexError, UnicodeDecodeError) as error:
        raise DamagedArtifact(f"{path}: is not a whole ExecuTorch program; export or copy it again") from error


def _read(path: Path, data: mmap.mmap) -> Contents:
    size = len(data)
    if size < 40 or data[4:6] != b"ET":
        raise DamagedArtifact(f"{path}: is not an ExecuTorch program; export or copy it again")
    end = size
    if data[8:12] == _EXTENDED:
        _, _, program_bytes, segments = _HEADER.unpack_from(data, 8)
        end = program_bytes
        if not 40 <= program_bytes <= size or segments > size:
            raise DamagedArtifact(f"{path}: is cut short: its header asks for more bytes than the {size:,} there are")
    flat = _Flat(data, end)
    program = flat.root()
    methods, delegates, operators, arenas = [], set(), set(), {}
    for plan in flat.tables(program, _PROGRAM_PLANS):
        name = flat.text(plan, _PLAN_NAME)
        methods.append(name)
        arenas[name] = flat.longs(plan, _PLAN_ARENAS)[1:]  # the first is a placeholder of the format
        delegates |= {flat.text(delegate, _DELEGATE_ID) for delegate in flat.tables(plan, _PLAN_DELEGATES)}
        operators |= {
            f"{flat.text(operator, _OPERATOR_NAME)}.{flat.text(operator, _OPERATOR_OVERLOAD)}".rstrip(".")
            for operator in flat.tables(plan, _PLAN_OPERATORS)
        }
    return Contents(size, tuple(methods), frozenset(delegates), frozenset(operators), arenas)


class _Flat:
    """Just enough of the flatbuffer format, each place checked before it is read."""

    def __init__(self, data: mmap.mmap, end: int) -> None:
        self._data, self._end = data, end

    def root(self) -> int:
        return self._unsigned(0)

    def tables(self, table: int, field: int) -> Iterator[int]:
        start, count = self._vector(table, field)
        for index in range(count):
            place = start + 4 * index
            yield place + self._unsigned(place)

    def longs(self, table: int, field: int) -> tuple[int, ...]:
        start, count = self._vector(table, field)
        return tuple(struct.unpack_from(f"<{count}q", self._data, self._inside(start, 8 * count)))

    def text(self, table: int, field: int) -> str:
        place = self._field(table, field)
        if place is None:
            return ""
        start = place + self._unsigned(place)
        length = self._unsigned(start)
        self._inside(start + 4, length)
        return self._data[start + 4 : start + 4 + min(length, 256)].decode()

    def _vector(self, table: int, field: int) -> tuple[int, int]:
        place = self._field(table, field)
        if place is None:
            return 0, 0
        start = place + self._unsigned(place)
        count = self._unsigned(start)
        if count > _MAX_NAMES:
            raise LimitExceeded(f"a program with {count:,} entries in one list; at most {_MAX_NAMES:,} are read")
        return start + 4, count

    def _field(self, table: int, field: int) -> int | None:
        (back,) = struct.unpack_from("<i", self._data, self._inside(table, 4))
        layout = self._inside(table - back, 4)
        (length,) = struct.unpack_from("<H", self._data, layout)
        place = 4 + 2 * field
        if place + 2 > length:
            return None
        (offset,) = struct.unpack_from("<H", self._data, self._inside(layout + place, 2))
        return table + offset if offset else None

    def _unsigned(self, place: int) -> int:
        (found,) = struct.unpack_from("<I", self._data, self._inside(place, 4))
        return int(found)

    def _inside(self, place: int, length: int) -> int:
        if place < 0 or place + length > self._end:
            raise ValueError("an offset leads out of the file")
        return place
