"""Conditions of a measurement are read from the system; missing ones are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgekit.apps.bench.conditions import conditions
from edgekit.apps.bench.measurement import Conditions


def machine(root: Path, files: dict[str, str]) -> Conditions:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return conditions(canary_s=0.1, cores=2, read_gb_s=None, root=root)


MAINS = {"sys/class/power_supply/AC/type": "Mains", "sys/class/power_supply/AC/online": "1"}
BATTERY = {
    "sys/class/power_supply/AC/type": "Mains",
    "sys/class/power_supply/AC/online": "0",
    "sys/class/power_supply/BAT0/type": "Battery",
    "sys/class/power_supply/BAT0/status": "Discharging",
}
ZONES = {"sys/class/thermal/thermal_zone0/temp": "41000", "sys/class/thermal/thermal_zone1/temp": "-274000"}
PROCESSOR = {
    "sys/class/hwmon/hwmon0/name": "nvme",
    "sys/class/hwmon/hwmon0/temp1_input": "80000",
    "sys/class/hwmon/hwmon1/name": "k10temp",
    "sys/class/hwmon/hwmon1/temp1_input": "56500",
    "sys/class/hwmon/hwmon1/temp3_input": "61250",
}
GOVERNED = {
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1500000",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": "2500000",
}
FIXED = {"proc/cpuinfo": "model name\t: A processor\ncpu MHz\t\t: 2400.5\n\ncpu MHz\t\t: 2600.5"}


@pytest.mark.parametrize(
    ("files", "field", "value"),
    [
        pytest.param(MAINS, "power_source", "mains", id="plugged in"),
        pytest.param(BATTERY, "power_source", "battery", id="on battery"),
        pytest.param(ZONES, "temperature_c", 41.0, id="zones, one of them broken"),
        pytest.param(ZONES | PROCESSOR, "temperature_c", 61.25, id="the processor's own sensor, not the disk's"),
        pytest.param(GOVERNED, "frequency_mhz", 2000.0, id="the governor's frequency"),
        pytest.param(FIXED, "frequency_mhz", 2500.5, id="cpuinfo's frequency"),
        pytest.param(FIXED, "machine", "A processor", id="the processor's name"),
    ],
)
def test_reported_conditions_are_recorded(tmp_path: Path, files: dict[str, str], field: str, value: Any) -> None:
    found = machine(tmp_path, files)
    assert getattr(found, field) == value
    names = {"power_source": "power source", "temperature_c": "temperature", "frequency_mhz": "core frequency"}
    assert names.get(field) not in found.not_told


def test_unreported_conditions_are_named(tmp_path: Path) -> None:
    found = machine(tmp_path, {})
    assert {"power source", "temperature", "core frequency"} <= set(found.not_told)
    assert found.power_source is None and found.temperature_c is None and found.frequency_mhz is None
