"""The time for which an engine's idle threads spin before they sleep.

Between two operators of a call a thread waits only microseconds, and waking it from sleep takes as long as a small
operator. Spinning takes CPU time from other programs, so threads spin briefly and never between calls.
"""

from __future__ import annotations

from pathlib import Path

from edgekit.common.environment import environment_choice

BRIEFLY_US, LONG_US = 100, 1000
SPINNING = "idle threads spin for a millisecond between operators, as EDGEKIT_SPIN=on says"
_SUPPLIES = Path("/sys/class/power_supply")


def spin_us(supplies: Path = _SUPPLIES) -> int:
    """Return the microseconds that an idle thread spins: brief by default, none on battery.

    `EDGEKIT_SPIN=on` makes it a millisecond, for a machine that runs nothing else; with `off`, threads sleep at once.
    """
    setting = environment_choice("EDGEKIT_SPIN", "on", "off")
    if setting:
        return LONG_US if setting == "on" else 0
    return 0 if runs_on_battery(supplies) else BRIEFLY_US


def spins_long() -> bool:
    """Return True if `EDGEKIT_SPIN=on`."""
    return spin_us() == LONG_US


def runs_on_battery(supplies: Path = _SUPPLIES) -> bool:
    """Return True if Linux reports a discharging battery."""
    try:
        return any(_first_line(supply / "status") == "Discharging" for supply in supplies.iterdir())
    except OSError:
        return False


def _first_line(path: Path) -> str:
    try:
        return path.read_text()[:64].strip()
    except (OSError, ValueError):
        return ""
