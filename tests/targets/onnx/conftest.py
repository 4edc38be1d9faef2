"""What every test of the onnx target needs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def packed_as_usual(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test its own facts of the machine, among them the packed weights."""
    monkeypatch.delenv("EDGEKIT_PACKED", raising=False)
