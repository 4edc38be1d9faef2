"""One artifact of the bundled demo model for every example."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from exported_demo import export_demo

import edgekit


@pytest.fixture(scope="session")
def demo_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model for two requests at once."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("torch")
    return export_demo(tmp_path_factory.mktemp("examples") / "demo.edgekit")


@pytest.fixture(scope="session")
def demo(demo_artifact: Path) -> Iterator[edgekit.Runtime]:
    with edgekit.open(demo_artifact) as runtime:
        yield runtime
