"""The memory of this process and the free memory of the machine, as the OS counts them."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path

from edgekit.common.base import Frozen
from edgekit.common.cgroups import NO_LIMIT_BYTES, ReadText, cgroup_folders
from edgekit.common.proc import memory_sizes


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except (OSError, ValueError):
        return None


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


class Free(Frozen):
    """Memory that this process can still take before the OS intervenes, and the counter that it was read from."""

    bytes: int
    source: str


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
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def mapped_data_bytes(path: Path = Path("/proc/self/smaps")) -> int | None:
    """Return the resident bytes of mapped files other than libraries (the weights); None if the OS does not tell.

    A place of a file that is mapped several times, as by sessions with adapters, has the same pages and counts once.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    sizes, place = dict[str, int](), None
    for line in lines:
        if not line[:1].isupper():  # lines of fields begin with a capital letter
            words = line.split(maxsplit=5)
            counts = len(words) == 6 and words[5].startswith("/") and ".so" not in Path(words[5]).suffixes
            place = f"{words[2]} {words[5]}" if counts else None  # the offset, and the file
        elif place and line.startswith("Rss:"):
            sizes[place] = max(sizes.get(place, 0), int(line.split()[1]) << 10)
    return sum(sizes.values())


def _peak() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def free_memory(read: ReadText = _read) -> Free | None:
    """Return the least free memory of the machine and of this process's cgroups; None if the OS does not report it.

    Clean pages of files count as free: the OS drops them before it refuses memory.
    """
    if platform.system() == "Darwin":
        return _free_on_mac()
    limits = []
    available = _field(read("/proc/meminfo") or "", "MemAvailable")
    if available is not None:
        limits.append(Free(bytes=available, source="MemAvailable"))
    for folder, v2 in cgroup_folders(read("/proc/self/cgroup") or "", "memory"):
        names = ("memory.max", "memory.current") if v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (_number(read(f"{folder}/{name}")) for name in names)
        if limit is None or used is None or limit >= NO_LIMIT_BYTES:
            continue
        lines = dict(line.split(" ", 1) for line in (read(f"{folder}/memory.stat") or "").splitlines() if " " in line)
        prefix = "" if v2 else "total_"
        cached = sum(_number(lines.get(f"{prefix}{name}")) or 0 for name in ("inactive_file", "active_file"))
        limits.append(Free(bytes=max(0, limit - max(0, used - cached)), source=f"{folder}/{names[0]}"))
    return min(limits, key=lambda free: free.bytes, default=None)


def _field(text: str, name: str) -> int | None:
    line = next((line for line in text.splitlines() if line.startswith(f"{name}:")), "")
    words = line.split()
    return int(words[1]) << 10 if len(words) == 3 and words[1].isdigit() else None


def _number(text: str | None) -> int | None:
    word = (text or "").strip()
    return int(word) if word.isascii() and word.isdigit() else None


def _free_on_mac() -> Free | None:
    """Return the app's own limit where it has one (iOS), otherwise the memory that the kernel reports as free."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        left = getattr(library, "os_proc_available_memory", None)
        if left is not None:
            left.restype = ctypes.c_size_t
            if own := int(left()):
                return Free(bytes=own, source="os_proc_available_memory")
        percent, memory = _sysctl(library, "kern.memorystatus_level", 4), _sysctl(library, "hw.memsize", 8)
        if percent is not None and memory is not None:
            return Free(bytes=memory * percent // 100, source="kern.memorystatus_level of hw.memsize")
    return None


def _sysctl(library: ctypes.CDLL, name: str, size: int) -> int | None:
    value, length = ctypes.create_string_buffer(size), ctypes.c_size_t(size)
    if library.sysctlbyname(name.encode(), value, ctypes.byref(length), None, 0) != 0:
        return None
    return int.from_bytes(value.raw[: length.value], sys.byteorder)


def _physical_footprint() -> int | None:
    """Return `ri_phys_footprint`: the eighth 64-bit field of rusage_info_v0, after its 16-byte uuid."""
    if platform.system() != "Darwin":
        return None
    with suppress(OSError, AttributeError):
        fields = (ctypes.c_uint64 * 64)()
        if ctypes.CDLL(None).proc_pid_rusage(os.getpid(), 0, ctypes.byref(fields)) == 0:
            return int(fields[2 + 7])
    return None
