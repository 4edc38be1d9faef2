"""How fast this machine reads memory and multiplies: measured in a second, remembered between starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from edgekit import facts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

_SUBJECT, _NAME = "this-machine", "speed"
_READ_S, _MULTIPLY_S, _CHILD_S = 0.25, 0.12, 30.0
_SIDE, _PRODUCTS = 384, 4
_MIN_BYTES, _MAX_BYTES = 64 << 20, 1 << 30
# BLAS threads of its own, beside ours, spin against each other: forty times slower on a busy machine.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class MachineSpeed(NamedTuple):
    """The best of several runs on all cores."""

    read_gb_s: float
    fp32_tflops: float
    cores: int


def machine_speed(cores: int, cache_bytes: int, ram_bytes: int, *, again: bool = False) -> MachineSpeed:
    """What was measured on this machine with that many cores, measured now where it was not or `again` is asked."""
    known = None if again else _valid(facts.read_fact(_SUBJECT, _NAME), cores)
    if known is not None:
        return known
    found = _in_a_child(cores, cache_bytes, ram_bytes) or measure(cores, cache_bytes, ram_bytes)
    facts.write_fact(_SUBJECT, _NAME, found._asdict())
    return found


def measure(cores: int, cache_bytes: int, ram_bytes: int) -> MachineSpeed:
    """Both speeds, measured in this process."""
    return MachineSpeed(read_bandwidth(cores, cache_bytes, ram_bytes), multiply_speed(cores), cores)


def _in_a_child(cores: int, cache_bytes: int, ram_bytes: int) -> MachineSpeed | None:
    """Measured in a process whose BLAS keeps to one thread, which can only be said before it is loaded."""
    command = [sys.executable, "-m", __name__, str(cores), str(cache_bytes), str(ram_bytes)]
    surroundings = os.environ | dict.fromkeys(_ONE_THREAD, "1")
    try:
        done = subprocess.run(command, capture_output=True, timeout=_CHILD_S, check=True, env=surroundings)
        return _valid(json.loads(done.stdout), cores)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _valid(value: dict[str, Any] | None, cores: int) -> MachineSpeed | None:
    try:
        speed = MachineSpeed(**(value or {}))
        fine = speed.cores == cores and 0 < speed.read_gb_s < 1e6 and 0 < speed.fp32_tflops < 1e6
    except TypeError:
        return None
    return speed if fine else None


def read_bandwidth(cores: int, cache_bytes: int, ram_bytes: int) -> float:
    """GB/s that all cores together read from memory, through dot products over more than the caches hold."""
    import numpy as np

    # The last cache may be one for each group of cores: four times its size is past most of them.
    wanted = min(max(4 * cache_bytes, _MIN_BYTES), _MAX_BYTES, max(ram_bytes // 8, 1 << 20))
    each = max(1 << 18, wanted // cores // 4)
    sweeps = [partial(_sweep, np.ones(each, dtype=np.float32)) for _ in range(cores)]
    return _best_rate(sweeps, 4 * each * cores, _READ_S) / 1e9


def multiply_speed(cores: int) -> float:
    """TFLOPS of single-precision matrix products on all cores."""
    import numpy as np

    squares = [np.ones((_SIDE, _SIDE), dtype=np.float32) for _ in range(cores)]
    return (
        _best_rate([partial(_square, each) for each in squares], 2 * _SIDE**3 * _PRODUCTS * cores, _MULTIPLY_S) / 1e12
    )


def _sweep(part: Floats) -> None:
    part.dot(part)


def _square(matrix: Floats) -> None:
    for _ in range(_PRODUCTS):
        matrix.dot(matrix)


def _best_rate(tasks: Sequence[Callable[[], object]], work: int, limit_s: float) -> float:
    """The highest rate of at least three rounds in which every task ran once, each on its own thread."""
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


if __name__ == "__main__":
    json.dump(measure(*(int(word) for word in sys.argv[1:4]))._asdict(), sys.stdout)
