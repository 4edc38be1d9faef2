"""One artifact of the bundled demo model for every example."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import edgekit
from edgekit.artifact.export import export
from edgekit.contracts.recipe import named_recipe
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest


@pytest.fixture(scope="session")
def demo_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model for two requests at once."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("torch")
    request = PlanRequest(target="onnx", recipe=named_recipe("s8"), context=1024, sequences=2)
    plan = make_plans("demo", ["laptop-x86-16gb"], request)[0]
    return export(plan, tmp_path_factory.mktemp("examples") / "demo.edgekit").folder


@pytest.fixture(scope="session")
def demo(demo_artifact: Path) -> Iterator[edgekit.Runtime]:
    with edgekit.open(demo_artifact) as runtime:
        yield runtime
