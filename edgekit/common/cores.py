"""The processor cores that this process may use."""

from __future__ import annotations

import os
import threading
from typing import NamedTuple

from edgekit.common.proc import ReadText, cgroup_folders, read_or_none


class UsableCores(NamedTuple):
    """A number of cores, and what limits it."""

    number: int
    source: str


def cores_allowed() -> int:
    """Return the cores in this process's affinity mask; without one, all cores of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores(allowed: int | None = None, read: ReadText = read_or_none) -> UsableCores:
    """Return the cores of the affinity mask (`allowed`), or of a lower CPU quota of the cgroups, rounded up."""
    count = cores_allowed() if allowed is None else allowed
    quota, file = min(_quotas(read), default=(float(count), ""))
    if quota < count:
        return UsableCores(max(1, -int(-quota // 1)), f"a CPU quota of {quota:g} cores ({file})")
    return UsableCores(max(1, count), "cores in this process's affinity mask")


def check_threads(count: int) -> None:
    """Start and end `count` threads. Raises Python's RuntimeError where the system refuses one: libraries may abort."""
    end, threads = threading.Event(), []
    try:
        for _ in range(count):
            threads.append(threading.Thread(target=end.wait, daemon=True))
            threads[-1].start()
    finally:
        end.set()
        for thread in threads:
            if thread.is_alive():
                thread.join()


def _quotas(read: ReadText) -> list[tuple[float, str]]:
    found = []
    for folder, v2 in cgroup_folders(read("/proc/self/cgroup") or "", "cpu"):
        if v2:
            file, text = f"{folder}/cpu.max", read(f"{folder}/cpu.max") or ""
        else:
            file = f"{folder}/cpu.cfs_quota_us"
            text = f"{read(file) or ''} {read(f'{folder}/cpu.cfs_period_us') or ''}"
        words = text.split()
        if len(words) == 2 and all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
            found.append((int(words[0]) / int(words[1]), file))
    return found
