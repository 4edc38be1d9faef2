"""What every test of the onnx target needs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def packed_as_usual(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test its own facts of the machine, among them the packed weights."""
    monkeypatch.delenv("EDGEKIT_PACKED", raising=False)


@pytest.fixture
def own_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let onnxruntime's own operators compute, of which exact mode needs its rule."""
    monkeypatch.setenv("EDGEKIT_KERNELS", "off")
