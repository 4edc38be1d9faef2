"""NVIDIA GPUs of this machine, asked through NVML: pynvml where it is installed, else the driver's own library."""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

_MEMORY_CLOCK, _SM_CLOCK = 2, 1


class Gpu(NamedTuple):
    """One GPU; a figure that the driver does not tell is 0."""

    name: str
    memory_bytes: int
    memory_clock_mhz: int
    bus_bits: int
    cores: int
    core_clock_mhz: int
    capability: tuple[int, int]

    @property
    def bandwidth_gb_s(self) -> float:
        """Two transfers a clock over the whole bus."""
        return self.memory_clock_mhz * 1e6 * 2 * self.bus_bits / 8 / 1e9

    @property
    def fp32_tflops(self) -> float:
        """A multiplication and an addition a core and clock."""
        return self.cores * 2 * self.core_clock_mhz * 1e6 / 1e12


class Nvml(Protocol):
    """The questions that are asked; each may raise where the driver does not know."""

    def count(self) -> int: ...
    def name(self, index: int) -> str: ...
    def memory_bytes(self, index: int) -> int: ...
    def clock_mhz(self, index: int, kind: int) -> int: ...
    def bus_bits(self, index: int) -> int: ...
    def cores(self, index: int) -> int: ...
    def capability(self, index: int) -> tuple[int, int]: ...


def find_gpus(opened: Callable[[], Nvml | None]) -> list[Gpu]:
    """Every GPU with memory of its own, the largest first; none where there is no driver or it does not answer."""
    try:
        nvml = opened()
        count = nvml.count() if nvml is not None else 0
    except Exception:  # a broken driver is no GPU
        return []
    found = [gpu for index in range(min(count, 64)) if nvml is not None and (gpu := _ask(nvml, index)) is not None]
    return sorted(found, key=lambda gpu: -gpu.memory_bytes)


def _ask(nvml: Nvml, index: int) -> Gpu | None:
    memory_bytes = _or_zero(lambda: nvml.memory_bytes(index))
    if memory_bytes <= 0:
        return None  # an integrated GPU shares the machine's memory
    try:
        name, capability = nvml.name(index), nvml.capability(index)
    except Exception:
        name, capability = "NVIDIA GPU", (0, 0)
    return Gpu(
        name=name[:200] or "NVIDIA GPU",
        memory_bytes=memory_bytes,
        memory_clock_mhz=_or_zero(lambda: nvml.clock_mhz(index, _MEMORY_CLOCK)),
        bus_bits=_or_zero(lambda: nvml.bus_bits(index)),
        cores=_or_zero(lambda: nvml.cores(index)),
        core_clock_mhz=_or_zero(lambda: nvml.clock_mhz(index, _SM_CLOCK)),
        capability=capability,
    )


def _or_zero(ask: Callable[[], int]) -> int:
    try:
        return max(0, int(ask()))
    except Exception:
        return 0


def open_nvml() -> Nvml | None:
    """NVML, ready to be asked; None where the machine has no NVIDIA driver."""
    try:
        import pynvml
    except ImportError:
        pynvml = None
    if pynvml is not None:
        try:
            pynvml.nvmlInit()
            return _Pynvml(pynvml)
        except Exception:
            return None
    names = ["nvml.dll"] if sys.platform == "win32" else ["libnvidia-ml.so.1", "libnvidia-ml.so"]
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        return _Library(library) if library.nvmlInit_v2() == 0 else None
    return None


class _Pynvml:
    def __init__(self, module: Any) -> None:
        self._module = module

    def count(self) -> int:
        return int(self._module.nvmlDeviceGetCount())

    def name(self, index: int) -> str:
        name = self._module.nvmlDeviceGetName(self._handle(index))
        return name.decode(errors="replace") if isinstance(name, bytes) else str(name)

    def memory_bytes(self, index: int) -> int:
        return int(self._module.nvmlDeviceGetMemoryInfo(self._handle(index)).total)

    def clock_mhz(self, index: int, kind: int) -> int:
        return int(self._module.nvmlDeviceGetMaxClockInfo(self._handle(index), kind))

    def bus_bits(self, index: int) -> int:
        return int(self._module.nvmlDeviceGetMemoryBusWidth(self._handle(index)))

    def cores(self, index: int) -> int:
        return int(self._module.nvmlDeviceGetNumGpuCores(self._handle(index)))

    def capability(self, index: int) -> tuple[int, int]:
        major, minor = self._module.nvmlDeviceGetCudaComputeCapability(self._handle(index))
        return int(major), int(minor)

    def _handle(self, index: int) -> Any:
        return self._module.nvmlDeviceGetHandleByIndex(index)


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Library:
    """The driver's C interface, the few calls that are needed."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def count(self) -> int:
        return self._number("nvmlDeviceGetCount_v2")

    def name(self, index: int) -> str:
        text = ctypes.create_string_buffer(96)
        self._call("nvmlDeviceGetName", self._handle(index), text, ctypes.c_uint(96))
        return text.value.decode(errors="replace")

    def memory_bytes(self, index: int) -> int:
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._handle(index), ctypes.byref(memory))
        return int(memory.total)

    def clock_mhz(self, index: int, kind: int) -> int:
        return self._number("nvmlDeviceGetMaxClockInfo", self._handle(index), ctypes.c_uint(kind))

    def bus_bits(self, index: int) -> int:
        return self._number("nvmlDeviceGetMemoryBusWidth", self._handle(index))

    def cores(self, index: int) -> int:
        return self._number("nvmlDeviceGetNumGpuCores", self._handle(index))

    def capability(self, index: int) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvmlDeviceGetCudaComputeCapability", self._handle(index), ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def _handle(self, index: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        return handle

    def _number(self, name: str, *arguments: Any) -> int:
        number = ctypes.c_uint()
        self._call(name, *arguments, ctypes.byref(number))
        return number.value

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise OSError(f"{name} answered {status}")
