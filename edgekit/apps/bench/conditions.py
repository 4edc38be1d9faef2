"""Conditions of a measurement: load, power, temperature, frequency, versions, and which ones are not reported."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

from edgekit.apps.bench.measurement import Conditions
from edgekit.common.machine_facts import machine_key
from edgekit.common.machine_speed import physical_memory
from edgekit.common.packages import versions_of
from edgekit.common.proc import cpuinfo, read_or_none

_TOOLS = ("edgekit", "numpy", "onnxruntime", "onnxruntime-gpu", "mlx", "xllamacpp", "executorch", "torch", "tokenizers")
_PROCESSOR_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")


def conditions(
    *, canary_s: float, cores: int, read_gb_s: float | None, fp32_tflops: float | None = None, root: Path = Path("/")
) -> Conditions:
    """Return the current conditions; `root` is the root of /proc and /sys."""
    power, temperature, frequency = _power(root), _temperature(root), _frequency(root)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    reported = {"power source": power, "temperature": temperature, "core frequency": frequency, "load average": load}
    return Conditions(
        measured_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        machine=cpuinfo("model name", "Model", root=root) or platform.processor() or f"{platform.machine()} processor",
        machine_key=machine_key(),
        os=f"{platform.system()} {platform.release()}",
        cores=cores,
        ram_bytes=physical_memory(),
        load_average=None if load is None else round(load, 2),
        power_source=power,
        temperature_c=temperature,
        frequency_mhz=frequency,
        read_gb_s=read_gb_s,
        fp32_tflops=fp32_tflops,
        versions={"python": platform.python_version()} | versions_of(_TOOLS),
        canary_s=canary_s,
        not_told=tuple(name for name, value in reported.items() if value is None),
    )


def _text(path: Path) -> str:
    return (read_or_none(path) or "").strip()


def _numbers(root: Path, pattern: str) -> list[float]:
    values = [_text(path) for path in sorted(root.glob(pattern))]
    return [float(text) for text in values if text.lstrip("-").isdigit()]


def _power(root: Path) -> str | None:
    """Return `mains` or `battery`; None if the machine does not report it."""
    for supply in sorted(root.glob("sys/class/power_supply/*")):
        kind, online = _text(supply / "type"), _text(supply / "online")
        if kind in ("Mains", "USB") and online == "1":
            return "mains"
    statuses = [_text(supply / "status") for supply in sorted(root.glob("sys/class/power_supply/*"))]
    return "battery" if "Discharging" in statuses else None


def _temperature(root: Path) -> float | None:
    """Return the temperature of the hottest CPU sensor; if none is known to be the CPU's, of any sensor."""
    chips = [chip for chip in root.glob("sys/class/hwmon/hwmon*") if _text(chip / "name") in _PROCESSOR_SENSORS]
    values = [value / 1000 for chip in chips for value in _numbers(chip, "temp*_input")]
    values = values or [value / 1000 for value in _numbers(root, "sys/class/thermal/thermal_zone*/temp")]
    plausible = [value for value in values if 0 < value < 150]
    return max(plausible) if plausible else None


def _frequency(root: Path) -> float | None:
    """Return the mean frequency of all cores in MHz."""
    values = _numbers(root, "sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq")
    if values:
        return round(fmean(values) / 1000, 1)
    lines = _text(root / "proc/cpuinfo").splitlines()
    reported = [line.partition(":")[2].strip() for line in lines if line.startswith("cpu MHz")]
    values = [float(text) for text in reported if text.replace(".", "", 1).isdigit()]
    return round(fmean(values), 1) if values else None
