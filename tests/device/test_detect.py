"""Detection of this machine: every branch, with the output of real machines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from edgekit.common import machine_speed, nvidia
from edgekit.common.machine_speed import MachineSpeed, last_cache_bytes
from edgekit.common.nvidia import Gpu, find_gpus
from edgekit.contracts.device import DeviceProfile
from edgekit.device.catalogue import all_profiles, profile_sha256
from edgekit.device.detect import describe, readings
from edgekit.device.detect.surroundings import HostProbe, local_host
from edgekit.device.load import load_profile
from edgekit.errors import EdgekitError, Unsupported

MIB, GIB = 1 << 20, 1 << 30
MEMINFO = "MemTotal:       16316412 kB\nMemFree:         1234567 kB\nMemAvailable:    9000000 kB\n"
ZEN5 = (
    "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD Ryzen 7 9700X 8-Core Processor\n"
    "flags\t\t: fpu avx2 avx512f avx512_bf16 avx_vnni avx512_vnni\n"
)
PI5 = (
    "processor\t: 0\nBogoMIPS\t: 108.00\nFeatures\t: fp asimd evtstrm aes asimdhp cpuid asimdrdm lrcpc asimddp\n"
    "\nRevision\t: d04170\nModel\t\t: Raspberry Pi 5 Model B Rev 1.0\n"
)
M4 = (
    "hw.memsize: 17179869184\nhw.ncpu: 10\nhw.optional.arm64: 1\nhw.optional.arm.FEAT_DotProd: 1\n"
    "hw.optional.arm.FEAT_FP16: 1\nhw.optional.arm.FEAT_I8MM: 1\nhw.optional.arm.FEAT_BF16: 1\n"
    "hw.optional.arm.FEAT_SME: 1\nmachdep.cpu.brand_string: Apple M4\niogpu.wired_limit_mb: 0\n"
)
H100 = Gpu("NVIDIA H100 80GB HBM3", 85_520_809_984, 2619, 5120, 16896, 1980, (9, 0))
SMALL = Gpu("NVIDIA T400", 4 * GIB, 5001, 64, 384, 1425, (7, 5))


def machine(
    system: str = "Linux",
    files: dict[str, str] | None = None,
    answers: dict[tuple[str, ...], str] | None = None,
    cores: int = 8,
    memory: int | None = None,
    gpus: Sequence[Gpu] = (),
    installed: Sequence[str] = (),
    architecture: str = "x86_64",
    kernel: str = "6.8.0-41-generic",
) -> HostProbe:
    """Make a machine with these files and command outputs."""
    texts = {"/proc/meminfo": MEMINFO, "/proc/cpuinfo": ZEN5, **(files or {})} if system == "Linux" else files or {}
    return HostProbe(
        system=system,
        architecture=architecture,
        kernel=kernel,
        read=texts.get,
        run=lambda command: (answers or {}).get(tuple(command)),
        cores_allowed=lambda: cores,
        physical_memory=lambda: memory,
        gpus=lambda: list(gpus),
        installed=lambda name: "1.31.1" if name in installed else None,
        speed=lambda count, cache, ram: MachineSpeed(read_gb_s=40.0, fp32_tflops=0.5, cores=count),
    )


def mac(sysctl: str = M4, version: str = "26.1\n") -> HostProbe:
    answers = {("sysctl", "hw", "machdep.cpu.brand_string", "iogpu"): sysctl, ("sw_vers", "-productVersion"): version}
    return machine("Darwin", answers=answers, cores=10, architecture="arm64")


def test_a_linux_pc_is_described_by_its_files() -> None:
    files = {"/etc/os-release": 'NAME="Ubuntu"\nVERSION_ID="24.04"\n'}
    device = describe(machine(files=files))
    assert (device.name, device.kind, device.os, device.os_version) == ("this", "pc", "linux", "24.04")
    assert device.ram.value == 16316412 * 1024 and device.ram.confidence == "measured"
    assert device.chip == "AMD Ryzen 7 9700X 8-Core Processor"
    assert device.simd == ("avx2", "avx-vnni", "avx512", "avx512-vnni", "avx512-bf16")
    assert device.cpu_cores == 8 and device.usable_bandwidth_gb_s.value == 40.0
    assert device.int8_tops is not None and device.int8_tops.value == 2.0
    assert device.targets["onnx"] == ("cpu",)
    assert 0 < device.budget().total_bytes < device.ram.value


def test_amx_tiles_do_not_count_as_speed() -> None:
    device = describe(machine(files={"/proc/cpuinfo": ZEN5.replace("avx_vnni", "avx_vnni amx_int8 amx_bf16")}))
    assert device.int8_tops is not None and device.int8_tops.value == 2.0
    assert "amx-int8" in device.simd


@pytest.mark.parametrize(
    ("files", "memory", "cores"),
    [
        pytest.param({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": "4294967296\n"}, 4 * GIB, 8, id="v2"),
        pytest.param(
            {
                "/proc/self/cgroup": "0::/user.slice/app.scope\n",
                "/sys/fs/cgroup/user.slice/app.scope/memory.max": "max\n",
                "/sys/fs/cgroup/user.slice/memory.max": "2147483648\n",
                "/sys/fs/cgroup/user.slice/app.scope/cpu.max": "max 100000\n",
                "/sys/fs/cgroup/user.slice/cpu.max": "250000 100000\n",
            },
            2 * GIB,
            3,
            id="v2, a parent limits",
        ),
        pytest.param(
            {
                "/proc/self/cgroup": "4:memory:/job/7\n1:cpu,cpuacct:/job/7\n0::/\n",
                "/sys/fs/cgroup/memory/job/7/memory.limit_in_bytes": "1073741824\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "/sys/fs/cgroup/cpu,cpuacct/job/7/cpu.cfs_quota_us": "50000\n",
                "/sys/fs/cgroup/cpu,cpuacct/job/7/cpu.cfs_period_us": "100000\n",
            },
            1 * GIB,
            1,
            id="v1",
        ),
        pytest.param(
            {
                "/proc/self/cgroup": "4:memory:/docker/abc\n1:cpu:/docker/abc\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "536870912\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            512 * MIB,
            8,
            id="v1 in a container",
        ),
        pytest.param(
            {"/proc/self/cgroup": "4:memory:/\n", "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"},
            16316412 * 1024,
            8,
            id="v1 without a limit",
        ),
        pytest.param(
            {"/proc/self/cgroup": "0::/../../x\n", "/sys/fs/cgroup/x/memory.max": "1073741824"}, GIB, 8, id="outside"
        ),
        pytest.param(
            {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": "99999999999999"},
            16316412 * 1024,
            8,
            id="a limit above the memory",
        ),
        pytest.param({"/proc/self/cgroup": "nonsense\n\n:::\n"}, 16316412 * 1024, 8, id="nonsense"),
    ],
)
def test_the_limits_of_a_container_are_the_machines_limits(files: dict[str, str], memory: int, cores: int) -> None:
    device = describe(machine(files=files))
    assert device.ram.value == memory
    assert device.cpu_cores == cores
    assert device.budget().total_bytes < memory


def test_a_raspberry_pi_is_detected() -> None:
    files = {"/proc/cpuinfo": PI5, "/proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0"}
    device = describe(machine(files=files, cores=4, architecture="aarch64"))
    assert device.kind == "board" and device.chip == "Raspberry Pi 5 Model B Rev 1.0"
    assert device.simd == ("neon", "fp16", "dotprod")


def test_a_jetson_has_its_gpu_in_shared_memory() -> None:
    files = {"/proc/cpuinfo": PI5, "/proc/device-tree/model": "NVIDIA Jetson Orin Nano Engineering Reference\0"}
    device = describe(machine(files=files, gpus=[H100]))
    assert device.kind == "edge-gpu" and device.vram is None
    assert device.targets["onnx"] == ("cuda", "cpu")


def test_a_mac_takes_the_figures_of_its_chip() -> None:
    device = describe(mac(), lambda: tuple(all_profiles().values()))
    known = load_profile("macbook-m4-16gb")
    assert (device.kind, device.os, device.os_version, device.chip) == ("mac", "macos", "26.1", "Apple M4")
    assert device.ram.value == 16 * GIB
    assert device.budget().total_bytes == int(16 * GIB * 2 / 3)
    assert device.usable_bandwidth_gb_s == known.usable_bandwidth_gb_s
    assert device.simd == ("neon", "fp16", "dotprod", "bf16", "i8mm", "sme")
    assert device.targets["mlx"] == ("metal",)


def test_a_mac_with_an_unknown_chip_keeps_measured_figures() -> None:
    device = describe(mac(M4.replace("Apple M4", "Apple M9")), lambda: tuple(all_profiles().values()))
    assert device.chip == "Apple M9" and device.usable_bandwidth_gb_s.value == 40.0


def test_a_raised_wired_limit_raises_the_budget_of_a_mac() -> None:
    device = describe(mac(M4.replace("wired_limit_mb: 0", "wired_limit_mb: 14336")))
    assert device.budget().total_bytes == 14 * GIB
    assert "wired_limit_mb" in device.reserve.source


def test_a_large_mac_may_wire_three_quarters() -> None:
    device = describe(mac(M4.replace("17179869184", str(64 * GIB))))
    assert device.budget().total_bytes == 48 * GIB


def test_an_intel_mac_has_no_metal_target() -> None:
    sysctl = "hw.memsize: 17179869184\nhw.optional.avx2_0: 1\nmachdep.cpu.brand_string: Intel(R) Core(TM) i7-9750H\n"
    device = describe(mac(sysctl))
    assert device.simd == ("avx2",) and device.targets == {"onnx": ("cpu",)}


def test_a_mac_without_a_memory_size_is_refused() -> None:
    with pytest.raises(Unsupported, match="memory"):
        describe(mac(""))


def test_windows_is_described() -> None:
    device = describe(machine("Windows", memory=16 * GIB, architecture="AMD64", kernel="11"))
    assert (device.os, device.os_version) == ("windows", "11")
    assert device.budget().total_bytes == 12 * GIB
    arm = describe(machine("Windows", memory=16 * GIB, architecture="ARM64", kernel="11"))
    assert arm.simd == ("neon",)


def test_an_unknown_system_is_refused() -> None:
    with pytest.raises(Unsupported, match="Plan9"):
        describe(machine("Plan9"))


def test_a_machine_with_a_gpu_is_its_largest_gpu() -> None:
    device = describe(machine(gpus=[H100, SMALL]))
    assert device.kind == "gpu" and device.chip == H100.name
    assert device.vram is not None and device.vram.value == H100.memory_bytes
    assert device.peak_bandwidth_gb_s.value == pytest.approx(3352, abs=1)
    assert device.usable_bandwidth_gb_s.value == pytest.approx(0.84 * 3352, abs=1)
    assert device.fp32_tflops is not None and device.fp32_tflops.value == pytest.approx(66.9, abs=0.1)
    assert device.fp16_tflops is not None and device.fp16_tflops.value == pytest.approx(990, abs=10)
    assert device.targets == {"onnx": ("cuda",)}
    assert any("1 more GPUs" in note for note in device.notes)
    assert device.budget().total_bytes == H100.memory_bytes - GIB


def test_this_cpu_plans_without_the_gpu() -> None:
    device = describe(machine(gpus=[H100]), with_gpu=False)
    assert device.name == "this-cpu" and device.vram is None and device.targets["onnx"] == ("cpu",)


def test_a_gpu_that_the_installed_onnxruntime_cannot_use_is_only_noted() -> None:
    device = describe(machine(gpus=[H100], installed=["onnxruntime"]))
    assert device.vram is None and any("edgekit[cuda]" in note for note in device.notes)
    assert describe(machine(gpus=[H100], installed=["onnxruntime-gpu"])).vram is not None


def test_a_gpu_with_missing_driver_figures_is_described() -> None:
    device = describe(machine(gpus=[Gpu("Old", 2 * GIB, 0, 0, 0, 0, (3, 5))]))
    assert device.vram is not None and device.usable_bandwidth_gb_s.value == 40.0
    assert device.fp16_tflops is None and device.fp32_tflops is None
    assert any("bandwidth" in note for note in device.notes)


class Driver:
    """`pynvml` with one GPU, whose driver may refuse some of the calls."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    def __init__(self, refuses: Sequence[str] = (), memory: int = 24 * GIB) -> None:
        self.answers = {
            "Count": 1,
            "HandleByIndex": "a handle",
            "Name": "GeForce",
            "MemoryInfo": SimpleNamespace(total=memory),
            "MaxClockInfo": 2000,
            "MemoryBusWidth": 384,
            "NumGpuCores": 16384,
            "CudaComputeCapability": [8, 9],
        }
        self.refuses = refuses

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = name.removeprefix("nvmlDeviceGet")

        def answer(*arguments: Any) -> Any:
            if call in self.refuses:
                raise OSError(f"{call} not supported")
            return self.answers[call]

        return answer


def broken_driver() -> Driver:
    raise OSError("driver mismatch")


@pytest.mark.parametrize(
    ("opened", "found"),
    [
        pytest.param(lambda: None, 0, id="no driver"),
        pytest.param(broken_driver, 0, id="broken driver"),
        pytest.param(lambda: Driver(["Count"]), 0, id="no count"),
        pytest.param(lambda: Driver(["MemoryInfo"]), 0, id="memory of the machine"),
        pytest.param(lambda: Driver(["MaxClockInfo", "MemoryBusWidth", "NumGpuCores", "Name"]), 1, id="few answers"),
        pytest.param(lambda: Driver(), 1, id="all answers"),
    ],
)
def test_a_driver_that_does_not_answer_is_no_gpu(opened: Callable[[], Driver | None], found: int) -> None:
    assert len(find_gpus(opened)) == found


def test_a_gpu_is_described_by_its_driver() -> None:
    assert find_gpus(Driver) == [Gpu("GeForce", 24 * GIB, 2000, 384, 16384, 2000, (8, 9))]


def test_the_installed_bindings_have_every_call() -> None:
    import pynvml

    for call in Driver().answers:
        assert callable(getattr(pynvml, f"nvmlDeviceGet{call}"))
    assert callable(pynvml.nvmlDeviceGetTotalEnergyConsumption)
    assert pynvml.NVML_CLOCK_SM != pynvml.NVML_CLOCK_MEM


def test_asking_this_machine_for_gpus_never_fails() -> None:
    assert isinstance(find_gpus(nvidia.open_nvml), list)


@pytest.mark.parametrize(
    ("text", "size"),
    [("65536K\n", 64 << 20), ("1M", 1 << 20), ("512", 512), ("", 32 << 20), ("big", 32 << 20), ("-1K", 32 << 20)],
)
def test_the_size_of_the_last_cache_is_read(text: str, size: int) -> None:
    assert last_cache_bytes(lambda path: text if "index3" in path else None) == size


@pytest.mark.parametrize(
    ("release", "kernel", "version"),
    [
        ('VERSION_ID="22.04"\n', "5.15.148-tegra", "22.04"),
        ("VERSION_ID=12\n", "6.1.0", "12"),
        ('NAME="Arch Linux"\n', "6.12.3-arch1-1", "6.12.3"),
        ("VERSION_ID=rolling\n", "unknown", "0"),
        ("", "", "0"),
    ],
)
def test_os_version_falls_back_to_the_kernels(release: str, kernel: str, version: str) -> None:
    assert readings.linux_version(release, kernel) == version


NAMES = ["/proc/meminfo", "/proc/cpuinfo", "/proc/self/cgroup", "/etc/os-release", "/sys/fs/cgroup/memory.max"]
NAMES += ["/sys/fs/cgroup/cpu.max", "/proc/device-tree/model", "/sys/devices/system/cpu/cpu0/cache/index3/size"]


@given(files=st.dictionaries(st.sampled_from(NAMES), st.text(max_size=60)), cores=st.integers(1, 256))
@settings(deadline=None, max_examples=150)
def test_arbitrary_linux_files_give_a_profile_or_an_edgekit_error(files: dict[str, str], cores: int) -> None:
    try:
        device = describe(machine(files=files, cores=cores, memory=GIB))
    except EdgekitError:
        return
    assert device.budget().total_bytes > 0


@given(sysctl=st.text(max_size=200), version=st.text(max_size=20))
@settings(deadline=None, max_examples=100)
def test_arbitrary_sysctl_output_gives_a_profile_or_an_edgekit_error(sysctl: str, version: str) -> None:
    try:
        device = describe(mac(sysctl + "\nhw.memsize: 8589934592", version))
    except EdgekitError:
        return
    assert isinstance(device, DeviceProfile)


@pytest.mark.usefixtures("child_processes")
def test_speeds_are_measured_once_and_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    first = machine_speed.machine_speed(1, 1 << 20, 1 * GIB)
    assert first.read_gb_s > 0.1 and first.fp32_tflops > 1e-4

    def ones(cores: int, *_: int) -> MachineSpeed:
        return MachineSpeed(read_gb_s=1.0, fp32_tflops=1.0, cores=cores)

    monkeypatch.setattr(machine_speed, "_in_a_child", ones)
    assert machine_speed.machine_speed(1, 1 << 20, GIB) == first
    assert machine_speed.machine_speed(2, 1 << 20, GIB) == ones(2)
    assert machine_speed.machine_speed(2, 1 << 20, GIB, again=True) == ones(2)


def test_a_disturbed_measurement_never_lowers_the_remembered_speed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    measured = [
        MachineSpeed(read_gb_s=40.2, fp32_tflops=0.5, cores=2),
        MachineSpeed(read_gb_s=16.9, fp32_tflops=0.2, cores=2),
        MachineSpeed(read_gb_s=30.0, fp32_tflops=0.6, cores=2),
    ]
    monkeypatch.setattr(machine_speed, "_in_a_child", lambda *arguments: measured.pop(0))
    assert machine_speed.machine_speed(2, 1 << 20, GIB) == MachineSpeed(read_gb_s=40.2, fp32_tflops=0.5, cores=2)
    for now, remembered in (((16.9, 0.2), (40.2, 0.5)), ((30.0, 0.6), (40.2, 0.6))):
        present, kept = (machine_speed.machine_speed(2, 1 << 20, GIB, again=again) for again in (True, False))
        assert (present.read_gb_s, present.fp32_tflops) == now, "conditions report the present speed"
        assert (kept.read_gb_s, kept.fp32_tflops) == remembered


@pytest.mark.usefixtures("child_processes")
def test_speed_is_measured_in_process_if_no_child_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    monkeypatch.setattr(
        machine_speed, "measure", lambda cores, cache, ram: MachineSpeed(read_gb_s=2.0, fp32_tflops=2.0, cores=cores)
    )
    assert machine_speed.machine_speed(3, 1 << 20, GIB) == MachineSpeed(read_gb_s=2.0, fp32_tflops=2.0, cores=3)


def test_this_machine_is_the_same_on_every_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    one, other = load_profile("this"), load_profile("this")
    assert profile_sha256(one) == profile_sha256(other)
    assert one.cpu_cores <= (os.cpu_count() or 1)
    assert json.loads(one.model_dump_json())["name"] == "this"


def test_local_host_queries_return_text_or_none() -> None:
    ask = local_host()
    assert ask.read("/nonexistent") is None and ask.run(("/nonexistent/command",)) is None
    assert ask.cores_allowed() >= 1 and (ask.physical_memory() or 1) > 0
    assert ask.installed("pytest") is not None and ask.installed("no-such-distribution") is None
