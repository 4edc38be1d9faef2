"""Measures this machine's memory bandwidth and compute, in a second, and stores the result."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from edgekit.common import machine_facts as facts
from edgekit.common.base import Frozen
from edgekit.common.bounds import Count, MachineNumber
from edgekit.common.proc import ReadText, read_or_none

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

_SUBJECT, _NAME = "this-machine", "speed"
_READ_S, _MULTIPLY_S, _CHILD_S = 0.25, 0.12, 30.0
_SIDE, _PRODUCTS = 384, 4
_MIN_BYTES, _MAX_BYTES = 64 << 20, 1 << 30
# More BLAS threads would compete with ours for the cores: forty times slower on a busy machine.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class MachineSpeed(Frozen):
    """The machine's best measured speed on `cores` cores."""

    read_gb_s: MachineNumber
    fp32_tflops: MachineNumber
    cores: Count


def machine_speed(cores: int, cache_bytes: int, ram_bytes: int, *, again: bool = False) -> MachineSpeed:
    """Return the stored speed of this machine with `cores` cores; measure it if there is none or `again` is True.

    Other programs may disturb a measurement, so a new one never lowers the stored speed; it is returned unchanged.
    """
    known = facts.read_fact(_SUBJECT, _NAME, MachineSpeed)
    if known is not None and known.cores != cores:
        known = None
    if known is not None and not again:
        return known
    measured = _in_a_child(cores, cache_bytes, ram_bytes) or measure(cores, cache_bytes, ram_bytes)
    best = measured
    if known is not None:
        read, multiply = max(known.read_gb_s, measured.read_gb_s), max(known.fp32_tflops, measured.fp32_tflops)
        best = MachineSpeed(read_gb_s=read, fp32_tflops=multiply, cores=cores)
    if best != known:
        facts.write_fact(_SUBJECT, _NAME, best)
    return measured


def measure(cores: int, cache_bytes: int, ram_bytes: int) -> MachineSpeed:
    """Measure bandwidth and compute in this process."""
    return MachineSpeed(
        read_gb_s=read_bandwidth(cores, cache_bytes, ram_bytes), fp32_tflops=multiply_speed(cores), cores=cores
    )


def _in_a_child(cores: int, cache_bytes: int, ram_bytes: int) -> MachineSpeed | None:
    """Measure in a child process with single-threaded BLAS, a setting read at import; None on failure."""
    command = [sys.executable, "-m", __name__, str(cores), str(cache_bytes), str(ram_bytes)]
    environment = os.environ | dict.fromkeys(_ONE_THREAD, "1")
    try:
        done = subprocess.run(command, capture_output=True, timeout=_CHILD_S, check=True, env=environment)
        return MachineSpeed.model_validate_json(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def read_bandwidth(cores: int, cache_bytes: int, ram_bytes: int) -> float:
    """Measure the GB/s that all cores together read from memory, by dot products larger than the caches."""
    import numpy as np

    # There may be one last-level cache per group of cores: four times its size exceeds most of them.
    total_bytes = min(max(4 * cache_bytes, _MIN_BYTES), _MAX_BYTES, max(ram_bytes // 8, 1 << 20))
    each = max(1 << 18, total_bytes // cores // 4)
    parts = [np.ones(each, dtype=np.float32) for _ in range(cores)]
    sweeps = [partial(part.dot, part) for part in parts]
    return _best_rate(sweeps, 4 * each * cores, _READ_S) / 1e9


def multiply_speed(cores: int) -> float:
    """Measure the TFLOPS of single-precision matrix products on all cores."""
    import numpy as np

    def multiply(matrix: Floats) -> None:
        for _ in range(_PRODUCTS):
            matrix.dot(matrix)

    tasks = [partial(multiply, np.ones((_SIDE, _SIDE), dtype=np.float32)) for _ in range(cores)]
    return _best_rate(tasks, 2 * _SIDE**3 * _PRODUCTS * cores, _MULTIPLY_S) / 1e12


def _best_rate(tasks: Sequence[Callable[[], object]], work: int, limit_s: float) -> float:
    """Return the highest rate of at least three rounds; a round runs every task once, each in its own thread."""
    best_s, rounds = float("inf"), 0
    with ThreadPoolExecutor(len(tasks)) as threads:
        end = time.perf_counter() + limit_s
        while rounds < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            for done in [threads.submit(task) for task in tasks]:
                done.result()
            best_s = min(best_s, time.perf_counter() - start)
            rounds += 1
    return work / max(best_s, 1e-9)


def last_cache_bytes(read: ReadText = read_or_none) -> int:
    """Return the size of the first core's last-level cache; 32 MiB if it is not known."""
    sizes = [_cache_size(read(f"/sys/devices/system/cpu/cpu0/cache/index{index}/size") or "") for index in range(5)]
    return max(sizes) or 32 << 20


def _cache_size(text: str) -> int:
    match = re.fullmatch(r"(\d{1,12})([KMG]?)", text.strip())
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]] if match else 0


def physical_memory() -> int | None:
    """Return the bytes of memory of this machine; None if the system does not say."""
    if sys.platform == "win32":
        return _windows_memory()
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _windows_memory() -> int | None:
    import ctypes

    library = getattr(ctypes, "windll", None)
    amount_kib = ctypes.c_ulonglong()
    if library is None or not library.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(amount_kib)):
        return None
    return amount_kib.value * 1024


if __name__ == "__main__":
    sys.stdout.write(measure(*(int(word) for word in sys.argv[1:4])).model_dump_json())
