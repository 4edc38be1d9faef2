"""The bundled demo model as an artifact for two requests at once."""

from __future__ import annotations

from pathlib import Path

from edgekit.artifact.export import export
from edgekit.contracts.recipe import named_recipe
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest


def export_demo(out: Path, *, kv_bits: int | None = None) -> Path:
    request = PlanRequest(target="onnx", recipe=named_recipe("s8"), context=1024, sequences=2, kv_bits=kv_bits)
    return export(make_plans("demo", ["laptop-x86-16gb"], request)[0], out).folder
