"""Energy in joules from hardware counters: RAPL for CPUs, NVML for NVIDIA GPUs.

A counter covers the whole package or card, not one process; a measurement names its counters.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from edgekit.common.nvidia import open_nvml

_MAX_GPUS = 64


class Counter(Protocol):
    """A cumulative energy counter."""

    name: str

    def joules(self) -> float: ...


class Rapl:
    """The counter of one CPU package, which wraps to zero."""

    def __init__(self, folder: Path) -> None:
        self.name = f"RAPL {(folder / 'name').read_text().strip()}"
        self._file, self._range = folder / "energy_uj", int((folder / "max_energy_range_uj").read_text())
        self._last, self._wraps = int(self._file.read_text()), 0

    def joules(self) -> float:
        now = int(self._file.read_text())
        if now < self._last:
            self._wraps += 1
        self._last = now
        return (self._wraps * self._range + now) / 1e6


class PowerNvml:
    """The energy counter of one GPU."""

    def __init__(self, nvml: Any, index: int) -> None:
        self.name = f"NVML GPU {index}"
        self._nvml, self._gpu = nvml, nvml.nvmlDeviceGetHandleByIndex(index)
        self.joules()

    def joules(self) -> float:
        """Read the counter. Raises OSError if this GPU does not count energy."""
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu)) / 1000
        except Exception as error:  # NVMLError, which is known only where nvidia-ml-py is installed
            raise OSError(f"{self.name} does not count energy: {error}") from error


class Meter:
    """The sum of this machine's energy counters; `why` names them, or the reason for having none."""

    def __init__(self, counters: list[Counter], why: str) -> None:
        self._counters, self.why = counters, why

    @property
    def source(self) -> str | None:
        return ", ".join(counter.name for counter in self._counters) or None

    def joules(self) -> float | None:
        """Return the energy so far; None without a counter."""
        try:
            return sum(counter.joules() for counter in self._counters) if self._counters else None
        except (OSError, ValueError):
            return None


def meter(root: Path = Path("/"), opened: Callable[[], Any | None] = open_nvml) -> Meter:
    """Return the meter of this machine.

    Args:
        root: the root of the system's files.
        opened: returns the initialised `pynvml` module, or None without an NVIDIA driver.
    """
    counters: list[Counter] = []
    reasons = []
    folders = sorted(root.glob("sys/class/powercap/intel-rapl:[0-9]"))
    for folder in folders:
        try:
            counters.append(Rapl(folder))
        except (OSError, ValueError):
            reasons.append("the RAPL counters may not be read by this user")
    if not folders:
        reasons.append("no RAPL counters")
    gpus = _gpu_counters(opened)
    counters += gpus
    if not gpus:
        reasons.append("no NVML energy counter")
    return Meter(counters, "; ".join(dict.fromkeys(reasons)) if not counters else "read from whole packages and cards")


def _gpu_counters(opened: Callable[[], Any | None]) -> list[Counter]:
    nvml = opened()
    if nvml is None:
        return []
    try:
        count = int(nvml.nvmlDeviceGetCount())
    except Exception:  # a broken driver counts nothing
        return []
    counters: list[Counter] = []
    for index in range(min(count, _MAX_GPUS)):
        with suppress(Exception):  # this card does not count energy
            counters.append(PowerNvml(nvml, index))
    return counters
