"""The external data file with the weights of all graphs of an artifact."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.common.files import disk_full

DATA_FILE = "weights.bin"
# Large tensors begin on a page boundary of any system, so that they can be mapped; small ones on a cache line.
_LARGE_BYTES, _LARGE_ALIGNMENT, _SMALL_ALIGNMENT = 1 << 20, 1 << 16, 64


class DataLocation(NamedTuple):
    """The byte range of a tensor in the data file."""

    offset: int
    length: int

    def part(self, offset: int, length: int) -> DataLocation:
        """Return a range of bytes inside this one."""
        assert offset >= 0 and offset + length <= self.length
        return DataLocation(self.offset + offset, length)


class DataFile:
    """Appends tensors in pieces, so that a whole tensor is never in memory."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / DATA_FILE
        self._file = self.path.open("wb")
        self.size = 0

    def add(self, pieces: Iterable[Any], length: int) -> DataLocation:
        """Append `length` bytes, given as arrays; return their location."""
        alignment = _LARGE_ALIGNMENT if length >= _LARGE_BYTES else _SMALL_ALIGNMENT
        padding = -self.size % alignment
        offset = self.size + padding
        with disk_full(self.path, padding + length):
            self._file.write(bytes(padding))
            written = 0
            for piece in pieces:
                written += self._file.write(memoryview(piece).cast("B"))
        assert written == length, f"{written} bytes were written, {length} announced"
        self.size = offset + length
        return DataLocation(offset, length)

    def __enter__(self) -> DataFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def are_halves(scales: NDArray[Any]) -> bool:
    """Whether 16 bits hold all scales, as they hold those that edgekit makes."""
    with np.errstate(over="ignore"):
        return np.array_equal(scales, scales.astype(np.float16))
