"""Pages of memory: small ones of our own, and those of mapped files that were only looked at and go back, on Linux.

A page of a file that is needed again comes back from the system's cache. Knows nothing of what the files hold.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+\s*(.*)")


class Mapping(NamedTuple):
    """A run of addresses that shows a file."""

    start: int
    stop: int
    is_clean: bool  # no page was written to, so that nothing is lost by letting go


def anonymous(size: int) -> mmap.mmap:
    """Private zero pages, small ones. Python's default mapping is shared, and a shared page is never given back."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def forget_pages(folder: Path) -> int:
    """Let go of every clean page of files in `folder`; how many bytes of mappings that were."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return 0
    try:
        advise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return 0
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    forgotten = 0
    for mapping in mappings_of(folder):
        size = mapping.stop - mapping.start
        if mapping.is_clean and advise(mapping.start, size, mmap.MADV_DONTNEED) == 0:
            forgotten += size
    return forgotten


def mappings_of(folder: Path) -> Iterator[Mapping]:
    """Where files of `folder` are mapped in this process."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return
    inside = f"{folder.resolve()}/"
    start = stop = 0
    for line in lines:
        if match := _HEADER.fullmatch(line):
            start, stop = (int(match[1], 16), int(match[2], 16)) if match[3].startswith(inside) else (0, 0)
        elif stop and line.startswith("Private_Dirty:"):
            yield Mapping(start, stop, line.split()[1] == "0")
