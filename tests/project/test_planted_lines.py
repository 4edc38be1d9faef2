"""Every planted fault still replaces one line of the code, so that the script says what it seems to say."""

from __future__ import annotations

from pathlib import Path

from planted_lines import FAULTS

ROOT = Path(__file__).parents[2]


def test_every_fault_replaces_one_line() -> None:
    assert [fault for fault in FAULTS if (ROOT / fault.file).read_text().count(fault.right) != 1] == []
    assert all((ROOT / place).exists() for fault in FAULTS for place in fault.tests.split())
