"""Reads flatbuffer tables by field numbers, with every offset checked.

An offset outside the file raises ValueError, which `sound` turns into `DamagedArtifact`.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgekit.errors import DamagedArtifact, InvalidInput, LimitExceeded

_MAX_ENTRIES = 1 << 16
_MAX_TEXT = 256


@contextmanager
def sound(path: Path) -> Iterator[mmap.mmap]:
    """Map the program at `path` for a block. Errors of reading its structure are raised as `DamagedArtifact`."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
    except FileNotFoundError as error:
        raise InvalidInput(f"{path}: is missing; export the artifact again") from error
    except (OSError, ValueError, struct.error, IndexError, UnicodeDecodeError) as error:
        raise DamagedArtifact(f"{path}: is not a whole ExecuTorch program; export or copy it again") from error


class Flat:
    """The tables between `start` and `end`; a table is represented by its offset."""

    def __init__(self, data: mmap.mmap, start: int, end: int) -> None:
        self._data, self._start, self._end = data, start, end

    def root(self) -> int:
        return self._start + self._unsigned(self._start)

    def table(self, table: int, field: int) -> int | None:
        """Return the table that a field refers to; None if the field is not set."""
        place = self.place(table, field)
        return None if place is None else place + self._unsigned(place)

    def place(self, table: int, field: int) -> int | None:
        """Return the offset of a field's bytes in the file; None if the field has its default and is not written."""
        (back,) = struct.unpack_from("<i", self._data, self._inside(table, 4))
        layout = self._inside(table - back, 4)
        (length,) = struct.unpack_from("<H", self._data, layout)
        place = 4 + 2 * field
        if place + 2 > length:
            return None
        (offset,) = struct.unpack_from("<H", self._data, self._inside(layout + place, 2))
        return table + offset if offset else None

    def union(self, table: int, field: int) -> tuple[int, int] | None:
        """Return the kind and the table of a union: the kind is in `field`, the table in the next field."""
        value = self.table(table, field + 1)
        return None if value is None else (self.number(table, field, "B"), value)

    def tables(self, table: int, field: int) -> Iterator[int]:
        start, count = self._vector(table, field)
        for index in range(count):
            place = start + 4 * index
            yield place + self._unsigned(place)

    def number(self, table: int, field: int, form: str = "I", default: int = 0) -> int:
        """Return a number in the `struct` format `form`; for a field that is not written, `default`."""
        place = self.place(table, field)
        if place is None:
            return default
        return int(struct.unpack_from(f"<{form}", self._data, self._inside(place, struct.calcsize(form)))[0])

    def numbers(self, table: int, field: int, form: str = "q") -> tuple[int, ...]:
        start, count = self._vector(table, field)
        return struct.unpack_from(f"<{count}{form}", self._data, self._inside(start, struct.calcsize(form) * count))

    def span(self, table: int, field: int) -> tuple[int, int]:
        """Return offset and length of a field's bytes."""
        start, count = self._vector(table, field, most=self._end)
        self._inside(start, count)
        return start, count

    def text(self, table: int, field: int) -> str:
        place = self.place(table, field)
        if place is None:
            return ""
        start = place + self._unsigned(place)
        length = self._unsigned(start)
        self._inside(start + 4, length)
        return self._data[start + 4 : start + 4 + min(length, _MAX_TEXT)].decode()

    def _vector(self, table: int, field: int, most: int = _MAX_ENTRIES) -> tuple[int, int]:
        place = self.place(table, field)
        if place is None:
            return 0, 0
        start = place + self._unsigned(place)
        count = self._unsigned(start)
        if count > most:
            raise LimitExceeded(f"a program with {count:,} entries in one list; at most {most:,} are read")
        return start + 4, count

    def _unsigned(self, index: int) -> int:
        (number,) = struct.unpack_from("<I", self._data, self._inside(index, 4))
        return int(number)

    def _inside(self, index: int, length: int) -> int:
        if index < self._start or index + length > self._end:
            raise ValueError("an offset leads out of the file")
        return index
