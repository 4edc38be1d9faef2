"""Energy in joules, by the counters that the platform has: RAPL for processors, NVML for NVIDIA GPUs.

Counters are of the whole package or card, not of one process; a measurement says which were read.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class Counter(Protocol):
    """Energy used since some moment in the past."""

    name: str

    def joules(self) -> float: ...


class Rapl:
    """One package's counter, which begins again at zero when it is full."""

    def __init__(self, folder: Path) -> None:
        self.name = f"RAPL {(folder / 'name').read_text().strip()}"
        self._file, self._range = folder / "energy_uj", int((folder / "max_energy_range_uj").read_text())
        self._last, self._turns = int(self._file.read_text()), 0

    def joules(self) -> float:
        now = int(self._file.read_text())
        if now < self._last:
            self._turns += 1
        self._last = now
        return (self._turns * self._range + now) / 1e6


class Nvml:
    """One GPU's counter, by the driver's own library."""

    def __init__(self, library: ctypes.CDLL, index: int) -> None:
        self.name = f"NVML GPU {index}"
        self._library, self._device = library, ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self._device)):
            raise OSError("no such GPU")
        self.joules()

    def joules(self) -> float:
        millijoules = ctypes.c_ulonglong()
        if self._library.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules)):
            raise OSError("this GPU does not count energy")
        return millijoules.value / 1000


class Meter:
    """All counters of this machine together; `why` says what is read, or why nothing can be."""

    def __init__(self, counters: list[Counter], why: str) -> None:
        self._counters, self.why = counters, why

    @property
    def source(self) -> str | None:
        return ", ".join(counter.name for counter in self._counters) or None

    def joules(self) -> float | None:
        """None where nothing counts."""
        try:
            return sum(counter.joules() for counter in self._counters) if self._counters else None
        except (OSError, ValueError):
            return None


def meter(root: Path = Path("/"), open_nvml: Callable[[], ctypes.CDLL | None] | None = None) -> Meter:
    """What can be read here."""
    counters: list[Counter] = []
    reasons = []
    folders = sorted(root.glob("sys/class/powercap/intel-rapl:[0-9]"))
    for folder in folders:
        try:
            counters.append(Rapl(folder))
        except (OSError, ValueError):
            reasons.append("RAPL is here and may not be read by this user")
    if not folders:
        reasons.append("no RAPL counters")
    gpus = _gpus(open_nvml or _library)
    counters += gpus
    if not gpus:
        reasons.append("no NVML energy counter")
    return Meter(counters, "; ".join(dict.fromkeys(reasons)) if not counters else "read from whole packages and cards")


def _gpus(open_nvml: Callable[[], ctypes.CDLL | None]) -> list[Counter]:
    try:
        library = open_nvml()
        if library is None or library.nvmlInit_v2():
            return []
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    except (OSError, AttributeError):
        return []
    found: list[Counter] = []
    for index in range(min(count.value, 64)):
        try:
            found.append(Nvml(library, index))
        except (OSError, AttributeError):
            continue
    return found


def _library() -> ctypes.CDLL | None:
    name = ctypes.util.find_library("nvidia-ml")
    return ctypes.CDLL(name) if name else None
