"""The time that idle threads of an engine spin."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgekit.enginekit.spinning import BRIEFLY_US, LONG_US, runs_on_battery, spin_us
from edgekit.errors import InvalidInput


def supply(folder: Path, name: str, status: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "status").write_text(status + "\n")


def test_threads_spin_briefly_unless_on_battery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGEKIT_SPIN", raising=False)
    assert spin_us(tmp_path / "none") == BRIEFLY_US
    (tmp_path / "AC").mkdir()  # a mains supply has no status
    supply(tmp_path, "BAT0", "Charging")
    assert spin_us(tmp_path) == BRIEFLY_US and not runs_on_battery(tmp_path)
    supply(tmp_path, "BAT1", "Discharging")
    assert spin_us(tmp_path) == 0


def test_edgekit_spin_setting_overrides_battery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supply(tmp_path, "BAT0", "Discharging")
    for setting, expected in (("on", LONG_US), ("off", 0), ("", 0)):
        monkeypatch.setenv("EDGEKIT_SPIN", setting)
        assert spin_us(tmp_path) == expected
    monkeypatch.setenv("EDGEKIT_SPIN", "maybe")
    with pytest.raises(InvalidInput, match="set it to on or off"):
        spin_us(tmp_path)
