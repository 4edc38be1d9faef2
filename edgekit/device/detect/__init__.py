"""Detects `this` machine as a device profile, from the system's own figures and from measurements.

The profile of a machine does not change between starts: measurements are stored, and free memory, which admission
reads when a model is opened, is not part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from edgekit.common.cores import usable_cores
from edgekit.common.machine_speed import last_cache_bytes
from edgekit.common.nvidia import Gpu
from edgekit.common.proc import NO_LIMIT_BYTES, cgroup_memory_limits, sizes_in
from edgekit.common.units import GIB, MIB
from edgekit.contracts.device import DeviceKind, DeviceProfile, EngineFigures, SourcedBytes, SourcedCount, SourcedNumber
from edgekit.device.detect import readings
from edgekit.device.detect.surroundings import HostProbe, local_host
from edgekit.errors import Unsupported

_WIRED_SMALL_BYTES = 32 * GIB
_ENGINE_SOURCE = "0.74 x the bandwidth read here: what onnx reached on 2 x86-64 cores when it decoded"
_GPU_SHARE = 0.84
_GPU_SOURCE = "0.84 x peak: the share that int4 decoding reached on an Orin Nano Super (86 of 102 GB/s)"
# Published fp16 and int8 tensor rates, dense, relative to single precision, by compute capability.
_TENSOR_RATIO = {
    (8, 0): (16.0, 32.0),
    (8, 6): (2.0, 8.0),
    (8, 9): (2.0, 8.0),
    (9, 0): (14.8, 29.5),
    (12, 0): (2.0, 8.0),
}


def this_device(*, with_gpu: bool = True, measure_again: bool = False) -> DeviceProfile:
    """Return the profile of this machine. Its speed is measured once (under a second) and with `measure_again`."""
    return describe(local_host(measure_again=measure_again), _installed_profiles, with_gpu=with_gpu)


def describe(
    ask: HostProbe, known_chips: Callable[[], Sequence[DeviceProfile]] = tuple, *, with_gpu: bool = True
) -> DeviceProfile:
    """Return the profile of the machine that `ask` queries. A Mac gets the figures of its chip from `known_chips`."""
    if ask.system == "Darwin":
        return _mac(ask, known_chips())
    if ask.system == "Linux":
        device = _linux(ask)
    elif ask.system == "Windows":
        device = _windows(ask)
    else:
        raise Unsupported(f"{ask.system}: cannot be detected; write a profile of it and use that instead of `this`")
    gpus = ask.gpus() if device.kind != "edge-gpu" else []
    if not gpus:
        return device
    if not with_gpu:
        return device.model_copy(update={"name": "this-cpu"})
    if ask.installed("onnxruntime") and not ask.installed("onnxruntime-gpu"):
        note = f"{gpus[0].name} is here, but the installed onnxruntime cannot use it: install edgekit[cuda] instead"
        return device.model_copy(update={"notes": (*device.notes, note)})
    return _with_gpu(device, gpus)


def _installed_profiles() -> Sequence[DeviceProfile]:
    from edgekit.device.catalogue import all_profiles

    return tuple(all_profiles().values())


def _linux(ask: HostProbe) -> DeviceProfile:
    cpuinfo = ask.read("/proc/cpuinfo") or ""
    board = (ask.read("/proc/device-tree/model") or "").strip("\0\n ")
    physical = sizes_in(ask.read("/proc/meminfo")).get("MemTotal") or ask.physical_memory()
    limit, file, _ = min(cgroup_memory_limits(ask.read), default=(NO_LIMIT_BYTES, "", True))
    if physical is None:
        raise Unsupported("this machine does not say how much memory it has; write a profile of it")
    if limit < physical:
        ram = _measured_bytes(limit, f"the memory limit of this process's cgroup, {file}")
        reserve = _rule_bytes(
            max(ram.value // 20, 32 * MIB), "a twentieth of the cgroup's limit, for other processes in it"
        )
    else:
        ram = _measured_bytes(physical, "MemTotal in /proc/meminfo")
        reserve = _rule_bytes(
            max(physical // 8, 256 * MIB), "an eighth of memory for the system and others, a rule of thumb"
        )
    kind: DeviceKind = "pc"
    if board.startswith("Raspberry Pi"):
        kind = "board"
    elif "Jetson" in board or "NVIDIA" in board:
        kind = "edge-gpu"
    chip = board or readings.cpu_name(cpuinfo, ask.architecture)
    targets: dict[str, tuple[str, ...]] = {
        "onnx": ("cpu",),
        "executorch": ("xnnpack",),
        "llamacpp": ("cpu",),
        "mlx": ("cpu",),
    }
    notes: tuple[str, ...] = ()
    if kind == "edge-gpu":
        targets = {"onnx": ("cuda", "cpu"), "executorch": ("xnnpack",), "llamacpp": ("cpu",)}
        notes = ("the bandwidth is what the processor reads; the GPU may reach more: compare a jetson profile",)
    return _measured(
        ask,
        kind=kind,
        os="linux",
        os_version=readings.linux_version(ask.read("/etc/os-release") or "", ask.kernel),
        chip=chip,
        ram=ram,
        reserve=reserve,
        simd=readings.simd_levels(cpuinfo),
        targets=targets,
        notes=notes,
    )


def _windows(ask: HostProbe) -> DeviceProfile:
    physical = ask.physical_memory()
    if physical is None:
        raise Unsupported("this machine does not say how much memory it has; write a profile of it")
    arm = ask.architecture.upper() == "ARM64"
    return _measured(
        ask,
        kind="pc",
        os="windows",
        os_version=readings.leading_version(ask.kernel),
        chip=f"{ask.architecture or 'unknown'} processor",
        ram=_measured_bytes(physical, "GetPhysicallyInstalledSystemMemory"),
        reserve=_rule_bytes(max(physical // 4, GIB), "a quarter of memory for Windows and others, a rule of thumb"),
        simd=("neon",) if arm else (),
        targets={"onnx": ("cpu",)},
        notes=("Windows does not say here which vector instructions the processor has.",) if not arm else (),
    )


def _measured(
    ask: HostProbe,
    *,
    kind: DeviceKind,
    os: Literal["linux", "windows", "macos"],
    os_version: str,
    chip: str,
    ram: SourcedBytes,
    reserve: SourcedBytes,
    simd: tuple[str, ...],
    targets: dict[str, tuple[str, ...]],
    notes: tuple[str, ...],
) -> DeviceProfile:
    """Return the profile of a machine that runs models on its CPU, with its measured speed."""
    cores, why = usable_cores(ask.cores_allowed(), ask.read)
    speed = ask.speed(cores, last_cache_bytes(ask.read), ram.value)
    read = round(speed.read_gb_s, 1)
    return DeviceProfile(
        name="this",
        title=f"this machine ({chip})"[:1000],
        kind=kind,
        os=os,
        os_version=os_version,
        chip=chip,
        ram=ram,
        reserve=reserve,
        peak_bandwidth_gb_s=_measured_number(
            read, f"best read of {cores} threads; the hardware's peak is not known here"
        ),
        usable_bandwidth_gb_s=_measured_number(read, f"dot products over more than the caches hold, {cores} threads"),
        engines={"cpu": EngineFigures(bandwidth_gb_s=_measured_number(round(0.74 * read, 1), _ENGINE_SOURCE))},
        fp32_tflops=_measured_number(round(speed.fp32_tflops, 4), f"matrix products of NumPy's BLAS, {cores} threads"),
        int8_tops=_int8(speed.fp32_tflops, simd),
        cores=SourcedCount(value=cores, source=why, confidence="measured"),
        simd=simd,
        targets=targets,
        notes=notes,
    )


def _int8(fp32_tflops: float, simd: tuple[str, ...]) -> SourcedNumber:
    """Derive the speed of 8-bit products. AMX tiles do not count: no engine was as fast as they are."""
    if any(level in simd for level in ("avx512-vnni", "avx-vnni", "dotprod", "i8mm")):
        ratio, why = 4, "8-bit dot products"
    else:
        ratio, why = 2, "16-bit sums of 8-bit products"
    source = f"{ratio} x the measured single precision, by {why}"
    return SourcedNumber(value=max(round(ratio * fp32_tflops, 4), 0.0001), source=source, confidence="derived")


def _mac(ask: HostProbe, known: Sequence[DeviceProfile]) -> DeviceProfile:
    values = readings.sysctl_values(ask.run(("sysctl", "hw", "machdep.cpu.brand_string", "iogpu")) or "")
    memory = values.get("hw.memsize", "")
    physical = int(memory) if memory.isascii() and memory.isdigit() else ask.physical_memory()
    if not physical:
        raise Unsupported("sysctl does not say how much memory this Mac has; write a profile of it")
    chip = values.get("machdep.cpu.brand_string") or "unknown Mac processor"
    apple = chip.startswith("Apple")
    device = _measured(
        ask,
        kind="mac",
        os="macos",
        os_version=readings.leading_version((ask.run(("sw_vers", "-productVersion")) or "").strip()),
        chip=chip,
        ram=_measured_bytes(physical, "sysctl hw.memsize"),
        reserve=_mac_reserve(physical, values.get("iogpu.wired_limit_mb", "0")),
        simd=readings.mac_simd(values),
        targets={"mlx": ("metal",), "executorch": ("xnnpack", "coreml"), "onnx": ("cpu",), "llamacpp": ("cpu",)}
        if apple
        else {"onnx": ("cpu",)},
        notes=(),
    )
    same = [other for other in known if other.kind == "mac" and other.chip == chip]
    if not same:
        return device
    nearest = min(same, key=lambda other: (abs(other.ram.value - physical), other.name))
    figures = {field: getattr(nearest, field) for field in _CHIP_FIGURES}
    note = (
        f"Bandwidth and compute are those of {nearest.name}: the GPU does the work, and only the processor is measured."
    )
    return device.model_copy(update={**figures, "notes": (note,)})


_COMPUTE = ("fp32_tflops", "fp16_tflops", "int8_tops")
_CHIP_FIGURES = ("peak_bandwidth_gb_s", "usable_bandwidth_gb_s", "engines", "measured", *_COMPUTE)


def _mac_reserve(physical: int, wired_limit_mb: str) -> SourcedBytes:
    wired = int(wired_limit_mb) * MIB if wired_limit_mb.isascii() and wired_limit_mb.isdigit() else 0
    if 0 < wired < physical:
        return _measured_bytes(physical - wired, "memory less sysctl iogpu.wired_limit_mb")
    share, words = (2 / 3, "two thirds") if physical <= _WIRED_SMALL_BYTES else (3 / 4, "three quarters")
    source = f"memory less {words}, Metal's recommended working set (ollama/ollama#434, ggml-org/llama.cpp#1870)"
    return SourcedBytes(value=physical - int(physical * share), source=source, confidence="derived")


def _with_gpu(device: DeviceProfile, gpus: Sequence[Gpu]) -> DeviceProfile:
    """Return the profile of the machine's largest GPU, whose memory holds the models."""
    gpu = gpus[0]
    others = [f"{len(gpus) - 1} more GPUs are here; one model uses one."][: len(gpus) - 1]
    ratio = _TENSOR_RATIO.get(gpu.capability)
    fp32 = gpu.fp32_tflops
    update: dict[str, object] = {
        "kind": "gpu",
        "title": f"this machine's {gpu.name}",
        "chip": gpu.name,
        "vram": _measured_bytes(gpu.memory_bytes, "NVML, nvmlDeviceGetMemoryInfo"),
        "reserve": _rule_bytes(
            min(GIB, gpu.memory_bytes // 4), "what llama.cpp leaves free on a GPU by default (--fit-target)"
        ),
        "fp32_tflops": _derived(fp32, f"{gpu.cores} cores x 2 x {gpu.core_clock_mhz} MHz, from NVML"),
        "fp16_tflops": _derived(fp32 * ratio[0], "the ratio of published cards of this compute capability")
        if ratio
        else None,
        "int8_tops": _derived(fp32 * ratio[1], "the ratio of published cards of this compute capability")
        if ratio
        else None,
        "targets": {"onnx": ("cuda",)},
        "notes": (*device.notes, "`this-cpu` is the same machine without its GPU.", *others),
    }
    peak = _derived(gpu.bandwidth_gb_s, f"2 x {gpu.memory_clock_mhz} MHz x {gpu.bus_bits} bit, from NVML")
    if peak is not None:
        update["peak_bandwidth_gb_s"] = peak
        update["usable_bandwidth_gb_s"] = _derived(_GPU_SHARE * peak.value, _GPU_SOURCE)
    else:
        update["notes"] = (
            *device.notes,
            "NVML does not tell this GPU's bandwidth: the processor's is shown, which is less.",
        )
    return device.model_copy(update=update)


def _derived(value: float, source: str) -> SourcedNumber | None:
    return SourcedNumber(value=round(value, 2), source=source, confidence="derived") if round(value, 2) > 0 else None


def _measured_number(value: float, source: str) -> SourcedNumber:
    return SourcedNumber(value=max(value, 0.0001), source=source, confidence="measured")


def _measured_bytes(value: int, source: str) -> SourcedBytes:
    return SourcedBytes(value=value, source=source, confidence="measured")


def _rule_bytes(value: int, source: str) -> SourcedBytes:
    return SourcedBytes(value=value, source=source, confidence="recalled")
