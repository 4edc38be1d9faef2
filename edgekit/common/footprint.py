"""The memory of this process, as the OS counts it, and the return of what its heap has left over."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import sys
from contextlib import suppress
from pathlib import Path

from edgekit.common.base import Frozen
from edgekit.common.proc import memory_sizes

_LIBRARY = re.compile(r"\.so(\.[^/]*)?$")  # a `Path` for each mapping would fill the table of interned names


class Footprint(Frozen):
    """Bytes of this process. None: this OS does not report the figure."""

    rss_bytes: int | None = None  # resident, shared pages counted in full
    pss_bytes: int | None = None  # resident, shared pages divided by the number of processes
    anonymous_bytes: int | None = None  # private memory without a file behind it
    file_bytes: int | None = None  # clean resident pages of files, which the OS may drop
    physical_footprint_bytes: int | None = None  # the figure by which macOS and iOS limit an app
    peak_rss_bytes: int | None = None

    @property
    def private_bytes(self) -> int | None:
        """The memory that this OS counts against the process, without clean pages of files."""
        return self.anonymous_bytes if self.physical_footprint_bytes is None else self.physical_footprint_bytes


def footprint() -> Footprint:
    """Measure this process now."""
    status = memory_sizes(Path("/proc/self/status"))
    rollup = memory_sizes(Path("/proc/self/smaps_rollup"))
    peak = status.get("VmHWM")
    return Footprint(
        rss_bytes=status.get("VmRSS"),
        pss_bytes=rollup.get("Pss"),
        anonymous_bytes=status.get("RssAnon"),
        file_bytes=status.get("RssFile"),
        physical_footprint_bytes=_physical_footprint(),
        peak_rss_bytes=_peak() if peak is None else peak,
    )


def private_bytes_now() -> int:
    """Return the private memory of this process, to subtract from a later figure; 0 if the OS does not report it."""
    return footprint_of("self") or _physical_footprint() or 0


def pages_touched() -> int | None:
    """Return how many pages of memory this thread has touched first, to subtract; None if the OS does not report it."""
    if sys.platform != "linux":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def footprint_of(process: int | str) -> int | None:
    """Return the private memory of a process, such as a worker; None where the OS does not report it.

    A scrape of metrics asks for it. Each system call gives up the interpreter's lock and may wait for a running step to
    get it back, so there are only three.
    """
    try:
        file = os.open(f"/proc/{process}/statm", os.O_RDONLY)
        try:
            _, resident, shared = os.read(file, 256).split()[:3]
        finally:
            os.close(file)
    except (OSError, ValueError):
        return None
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def mapped_data_bytes(path: Path = Path("/proc/self/smaps")) -> int | None:
    """Return the resident bytes of mapped files other than libraries (the weights); None if the OS does not tell.

    A part of a file that is mapped several times, as by sessions with adapters, has the same pages and counts once.
    """
    sizes, place = dict[str, int](), None
    try:
        with path.open() as lines:  # one by one: a list of them would leave a megabyte of holes in the heap
            for line in lines:
                if not line[:1].isupper():  # lines of fields begin with a capital letter
                    words = line.rstrip("\n").split(maxsplit=5)
                    counts = len(words) == 6 and words[5].startswith("/") and not _LIBRARY.search(words[5])
                    place = f"{words[2]} {words[5]}" if counts else None  # the offset, and the file
                elif place and line.startswith("Rss:"):
                    sizes[place] = max(sizes.get(place, 0), int(line.split()[1]) << 10)
    except OSError:
        return None
    return sum(sizes.values())


def _peak() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def _physical_footprint() -> int | None:
    """Return `ri_phys_footprint`: the eighth 64-bit field of rusage_info_v0, after its 16-byte uuid."""
    if platform.system() != "Darwin":
        return None
    with suppress(OSError, AttributeError):
        fields = (ctypes.c_uint64 * 64)()
        if ctypes.CDLL(None).proc_pid_rusage(os.getpid(), 0, ctypes.byref(fields)) == 0:
            return int(fields[2 + 7])
    return None


def return_unused() -> None:
    """Return freed heap memory to the system, if the C library can (glibc)."""
    with suppress(OSError, AttributeError, TypeError):  # Windows finds no library without a name
        ctypes.CDLL(None).malloc_trim(0)
