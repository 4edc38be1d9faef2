"""A phone that is a folder: services that say what a test tells them, and an `adb` of its own that reaches it."""

from __future__ import annotations

import marshal
import sys
from pathlib import Path
from typing import Any

from fake_adb_program import SERIAL

__all__ = ["BATTERY", "SERIAL", "THERMAL", "Phone"]

BATTERY = """Current Battery Service state:
  AC powered: false
  USB powered: true
  Wireless powered: false
  Max charging current: 500000
  status: 2
  health: 2
  present: true
  level: 85
  scale: 100
  voltage: 4233
  temperature: 281
  technology: Li-ion
"""
THERMAL = """IsStatusOverride: false
ThermalEventListeners:
\tcallbacks: 2
Thermal Status: {status}
Cached temperatures:
\tTemperature{{mValue=99.0, mType=3, mName=stale, mStatus=0}}
HAL Ready: true
Current temperatures from HAL:
\tTemperature{{mValue=36.5, mType=0, mName=CPU0, mStatus=0}}
\tTemperature{{mValue=33.1, mType=3, mName=skin, mStatus={status}}}
Current cooling devices from HAL:
\tCoolingDevice{{mValue=0, mType=2, mName=cpufreq-cpu0}}
"""
MEMINFO = """Applications Memory Usage (in Kilobytes):
Uptime: 1234 Realtime: 1234

** MEMINFO in pid 42 [native] **
                   Pss  Private  Private  SwapPss      Rss     Heap
                 Total    Dirty    Clean    Dirty    Total     Size
                ------   ------   ------   ------   ------   ------
        TOTAL    34567    25000     5000        0    40000        0

 App Summary
           TOTAL PSS:    34567            TOTAL RSS:    40000      TOTAL SWAP (KB):        0
"""
PROGRAMS = {
    "getprop": 'case $1 in ro.product.manufacturer) echo Google;; ro.product.model) echo "Pixel 9";; '
    "ro.build.version.release) echo 16;; ro.build.version.sdk) echo 36;; ro.build.id) echo BP1A;; "
    "ro.product.cpu.abi) cat $S/abi;; esac",
    "dumpsys": "case $1 in battery) cat $S/battery;; thermalservice) first=$(head -n 1 $S/thermal); "
    "[ $(wc -l < $S/thermal) -gt 1 ] && sed -i 1d $S/thermal; cat $S/thermal-$first;; "
    'power) echo "  mWakefulness=$(cat $S/screen)";; meminfo) cat $S/meminfo;; esac',
    "settings": "case $1 in get) cat $S/$3 2>/dev/null || echo null;; put) echo $4 > $S/$3;; esac",
    "svc": "case $3 in true) echo 7;; *) echo 0;; esac > $S/stay_on_while_plugged_in",
    "input": "echo $* >> $S/keys; [ -e $S/stuck ] || echo Awake > $S/screen",
}


class Phone:
    """One phone, and the `adb` that reaches it at `adb`."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.state, self.adb = folder, folder / "state", folder / "adb"
        self.data = folder / "data"
        for each in (self.state, self.data, folder / "bin"):
            each.mkdir(parents=True)
        for name, text in PROGRAMS.items():
            (folder / "bin" / name).write_text(f"#!/bin/sh\nS={self.state}\n{text}\n")
            (folder / "bin" / name).chmod(0o755)
        self.tell(battery=BATTERY, abi="x86_64\n", thermal="0\n", screen="Awake\n", low_power="0\n", meminfo=MEMINFO)
        for status in range(5):
            self.tell(**{f"thermal-{status}": THERMAL.format(status=status)})
        self.set(**settings)
        self.adb.write_text(
            f"#!{sys.executable} -SE\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            f"from fake_adb_program import main\nsys.exit(main({str(folder)!r}, sys.argv[1:]))\n"
        )
        self.adb.chmod(0o755)

    def tell(self, **files: str) -> None:
        """What the phone's services say from now on."""
        for name, text in files.items():
            (self.state / name).write_text(text)

    def set(self, **settings: Any) -> None:
        """How the connection behaves from now on.

        `is`: device, offline, unauthorized or gone. `old`: no exit codes, and lines end as a terminal's do. `full`,
        `damages`: what becomes of files. `slow_s`: of each call. `cut`: a word of a command or file at which it breaks;
        `cut_after`: not before the phone has that file.
        """
        (self.folder / "settings").write_bytes(marshal.dumps(settings))

    def calls(self, word: str = "") -> list[list[str]]:
        """Every call of `adb` that had the word."""
        path = self.folder / "calls"
        records = path.read_text().split("\x1e")[:-1] if path.exists() else []
        return [call for call in (record.split("\x1f") for record in records) if not word or word in call]

    def pushed(self) -> list[str]:
        """The names of the files that were sent, in order."""
        return [Path(call[4]).name for call in self.calls("push")]
