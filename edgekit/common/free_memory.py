"""The memory that this process can still take, as the OS counts it."""

from __future__ import annotations

import ctypes
import platform
import re
import sys
from contextlib import suppress

from edgekit.common.base import Frozen
from edgekit.common.proc import ReadText, cgroup_memory_limits, number_in, read_or_none, sizes_in


class Free(Frozen):
    """Memory that this process can still take before the OS intervenes, and the counter that it was read from."""

    bytes: int
    source: str


def free_memory(read: ReadText = read_or_none) -> Free | None:
    """Return the least free memory of the machine and of this process's cgroups; None if the OS does not report it.

    Clean pages of files count as free: the OS drops them before it refuses memory.
    """
    if platform.system() == "Darwin":
        return _free_on_mac()
    limits = []
    available = sizes_in(read("/proc/meminfo")).get("MemAvailable")
    if available is not None:
        limits.append(Free(bytes=available, source="MemAvailable"))
    most = re.search(r"Max address space +(\d+) ", read("/proc/self/limits") or "")
    used = sizes_in(read("/proc/self/status")).get("VmSize")
    if most is not None and used is not None:
        limits.append(Free(bytes=max(0, int(most[1]) - used), source="the limit of addresses (`ulimit -v`)"))
    for limit, file, v2 in cgroup_memory_limits(read):
        folder = file.rpartition("/")[0]
        used = number_in(read(f"{folder}/{'memory.current' if v2 else 'memory.usage_in_bytes'}"))
        if used is None:
            continue
        lines = dict(line.split(" ", 1) for line in (read(f"{folder}/memory.stat") or "").splitlines() if " " in line)
        prefix = "" if v2 else "total_"
        cached = sum(number_in(lines.get(f"{prefix}{name}")) or 0 for name in ("inactive_file", "active_file"))
        limits.append(Free(bytes=max(0, limit - max(0, used - cached)), source=file))
    return min(limits, key=lambda free: free.bytes, default=None)


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
