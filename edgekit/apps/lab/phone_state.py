"""The state of a phone, parsed from the output of Android's services.

The output differs between makers and versions; missing figures are None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

THERMAL = ("none", "light", "moderate", "severe", "critical", "emergency", "shutdown")
# Shell commands by name; they run in one call.
ASKED: Mapping[str, str] = {
    "maker": "getprop ro.product.manufacturer",
    "model": "getprop ro.product.model",
    "android": "getprop ro.build.version.release",
    "api": "getprop ro.build.version.sdk",
    "build": "getprop ro.build.id",
    "abi": "getprop ro.product.cpu.abi",
    "battery": "dumpsys battery",
    "thermal": "dumpsys thermalservice",
    "screen": "dumpsys power | grep -E 'mWakefulness='",
    "saver": "settings get global low_power",
    "awake": "settings get global stay_on_while_plugged_in",
}
_SYSTEM = {"android": "Android", "api": "API", "build": "build"}  # answers that name the system
_CHARGING = (2, 5)  # BatteryManager: charging, full
_MOST_TOLD = 200


class PhoneState(NamedTuple):
    """The state of a phone at one moment; None: not reported."""

    model: str
    os: str
    abi: str
    battery_percent: int | None
    is_charging: bool | None
    is_plugged: bool | None
    thermal: int | None  # Android's thermal status: 0 is none
    temperature_c: float | None
    screen: str | None  # "Awake", "Asleep", "Dozing", "Dreaming"
    is_saving_power: bool | None
    stays_on: str | None  # the present setting, to be restored

    @property
    def is_awake(self) -> bool | None:
        return None if self.screen is None else self.screen == "Awake"

    @property
    def thermal_words(self) -> str:
        if self.thermal is None:
            return "not told"
        return THERMAL[self.thermal] if self.thermal < len(THERMAL) else str(self.thermal)

    def __str__(self) -> str:
        """Describe the state in one line."""
        battery = "battery not told" if self.battery_percent is None else f"battery {self.battery_percent} %"
        if self.is_charging is not None:
            battery += ", charging" if self.is_charging else ", not charging"
        screen = "not told" if self.screen is None else self.screen.lower()
        return f"{self.model}, {self.os}, {self.abi}, {battery}, thermal status {self.thermal_words}, screen {screen}"


def phone_state(outputs: Mapping[str, str]) -> PhoneState:
    """Parse the outputs of the commands of `ASKED`."""
    words = {name: _word(text) for name, text in outputs.items()}
    battery = outputs.get("battery", "")
    level, scale, status = (_number(battery, name) for name in ("level", "scale", "status"))
    plugs = re.findall(r"^\s*(?:AC|USB|Wireless|Dock) powered:\s*(true|false)\s*$", battery, re.MULTILINE)
    thermal = re.search(r"Thermal Status:\s*(\d{1,3})\b", outputs.get("thermal", ""))
    screen = re.search(r"mWakefulness=([A-Za-z]{1,20})", outputs.get("screen", ""))
    release = " ".join(f"{title} {words[name]}" for name, title in _SYSTEM.items() if words.get(name))
    return PhoneState(
        model=f"{words.get('maker', '')} {words.get('model', '')}".strip() or "a phone",
        os=release or "Android",
        abi=words.get("abi", ""),
        battery_percent=_percent(level, scale),
        is_charging=None if status is None else status in _CHARGING,
        is_plugged="true" in plugs if plugs else None,
        thermal=int(thermal[1]) if thermal else None,
        temperature_c=_hottest(outputs.get("thermal", ""), battery),
        screen=screen[1] if screen else None,
        is_saving_power={"0": False, "1": True}.get(words.get("saver", "")),
        stays_on=words["awake"] if re.fullmatch(r"\d{1,2}", words.get("awake", "")) else None,
    )


def meminfo_bytes(outputs: str) -> int | None:
    """Parse the memory of one process, graphics memory included, from the output of `dumpsys meminfo PID`."""
    match = re.search(r"TOTAL PSS:\s*(\d{1,12})(?=\s|$)", outputs)
    match = match or re.search(r"^\s*TOTAL\s+(\d{1,12})(?=\s|$)", outputs, re.MULTILINE)
    return int(match[1]) << 10 if match else None


def _word(text: str) -> str:
    """Return the printable ASCII of the first line, shortened."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return "".join(letter for letter in line if " " <= letter < "\x7f")[:_MOST_TOLD].strip()


def _number(text: str, name: str) -> int | None:
    match = re.search(rf"^\s*{name}:\s*(-?\d{{1,9}})\s*$", text, re.MULTILINE)
    return int(match[1]) if match else None


def _percent(level: int | None, scale: int | None) -> int | None:
    if level is None or level < 0:
        return None
    return min(100, round(100 * level / (scale if scale and scale > 0 else 100)))


def _hottest(thermal: str, battery: str) -> float | None:
    """Return the temperature of the hottest sensor, battery included."""
    now = thermal.partition("Current temperatures from HAL:")[2] or thermal
    now = now.partition("Current cooling devices")[0]
    degrees = [float(value) for value in re.findall(r"Temperature\{mValue=(-?\d{1,4}(?:\.\d{1,9})?)", now)]
    tenths = _number(battery, "temperature")
    if tenths is not None:
        degrees.append(tenths / 10)
    plausible = [value for value in degrees if 0 < value < 150]
    return max(plausible) if plausible else None
