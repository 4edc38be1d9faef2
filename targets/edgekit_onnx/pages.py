"""Pages of memory: anonymous mappings of small pages, and releasing the clean pages of mapped files, on Linux.

Reading a released page again gets it from the system's page cache.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_DIRTY = re.compile(r"^Private_Dirty: +(\d+) kB$", re.MULTILINE)  # one line after each header
_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+\s*(.*)")


class Mapping(NamedTuple):
    """A range of addresses that maps a file."""

    start: int
    stop: int
    is_clean: bool  # no page was written, so releasing them loses nothing


def anonymous(size: int) -> mmap.mmap:
    """Map `size` zero bytes in private, small pages. Python's default mapping is shared and cannot be released."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def forget_pages(folder: Path) -> int:
    """Release every clean page of files in `folder`; return the bytes of their mappings."""
    if sys.platform == "win32":
        return 0
    try:
        advise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return 0
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    released = 0
    for mapping in mappings_of(folder):
        size = mapping.stop - mapping.start
        if mapping.is_clean and advise(mapping.start, size, mmap.MADV_DONTNEED) == 0:
            released += size
    return released


def mappings_of(folder: Path) -> Iterator[Mapping]:
    """Yield this process's mappings of files in `folder`."""
    try:
        text = Path("/proc/self/smaps").read_text(errors="replace")
    except OSError:
        return
    inside = f"{folder.resolve()}/"
    index = text.find(inside)
    while index >= 0:  # skip most of the tens of thousands of lines quickly
        line, end = text.rfind("\n", 0, index) + 1, text.find("\n", index)
        dirty = _DIRTY.search(text, end)
        if dirty and (match := _HEADER.fullmatch(text, line, end)) and match[3].startswith(inside):
            yield Mapping(int(match[1], 16), int(match[2], 16), dirty[1] == "0")
        index = text.find(inside, end)
