"""NVIDIA GPUs of this machine, queried through nvidia-ml-py, NVIDIA's bindings of the driver's management library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

_MAX_GPUS = 64


class Gpu(NamedTuple):
    """One GPU; a figure that the driver does not report is 0."""

    name: str
    memory_bytes: int
    memory_clock_mhz: int
    bus_bits: int
    cores: int
    core_clock_mhz: int
    capability: tuple[int, int]

    @property
    def bandwidth_gb_s(self) -> float:
        """Two transfers per clock over the whole bus."""
        return self.memory_clock_mhz * 1e6 * 2 * self.bus_bits / 8 / 1e9

    @property
    def fp32_tflops(self) -> float:
        """Return the float32 TFLOPS: a multiplication and an addition per core and clock."""
        return self.cores * 2 * self.core_clock_mhz * 1e6 / 1e12


def open_nvml() -> Any | None:
    """Import and initialise `pynvml`; None on a machine without a working NVIDIA driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, no driver, or one that does not match its library
        return None
    return pynvml


def find_gpus(opened: Callable[[], Any | None] = open_nvml) -> list[Gpu]:
    """Return every discrete GPU, the largest first; empty if the driver does not answer.

    Args:
        opened: returns the initialised `pynvml` module or None.
    """
    try:
        nvml = opened()
        count = int(nvml.nvmlDeviceGetCount()) if nvml is not None else 0
    except Exception:  # a broken driver is no GPU
        return []
    gpus = [gpu for index in range(min(count, _MAX_GPUS)) if (gpu := _gpu(nvml, index)) is not None]
    return sorted(gpus, key=lambda gpu: -gpu.memory_bytes)


def _gpu(nvml: Any, index: int) -> Gpu | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except Exception:
        return None
    memory_bytes = _or_zero(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total)
    if memory_bytes <= 0:
        return None  # an integrated GPU shares the machine's memory
    try:
        name = nvml.nvmlDeviceGetName(handle)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except Exception:
        name, major, minor = "NVIDIA GPU", 0, 0
    return Gpu(
        name=str(name)[:200] or "NVIDIA GPU",
        memory_bytes=memory_bytes,
        memory_clock_mhz=_or_zero(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        bus_bits=_or_zero(lambda: nvml.nvmlDeviceGetMemoryBusWidth(handle)),
        cores=_or_zero(lambda: nvml.nvmlDeviceGetNumGpuCores(handle)),
        core_clock_mhz=_or_zero(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
        capability=(int(major), int(minor)),
    )


def _or_zero(ask: Callable[[], int]) -> int:
    try:
        return max(0, int(ask()))
    except Exception:
        return 0
