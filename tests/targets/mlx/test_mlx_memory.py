"""MLX without Metal: the memory of plans that were made for it, and float weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from edgekit_mlx import MlxTarget
from edgekit_mlx.offers import on_this_machine

from edgekit.artifact.export import export
from edgekit.common.units import MIB
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import named_recipe
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.runtime.open import open_runtime

without_metal = pytest.mark.skipif(sys.platform == "darwin", reason="this machine has Metal")


def mac_plan(recipe: str) -> Plan:
    wish = PlanRequest(recipe=named_recipe(recipe), target="mlx", context=256)
    return make_plans("demo", ["macbook-m4-16gb"], wish)[0]


def test_a_plan_for_metal_stays_as_it_is_where_metal_is() -> None:
    plan = mac_plan("s8")
    assert on_this_machine(plan, has_metal=True) == plan


@without_metal
def test_a_plan_for_metal_counts_the_cpu_backend_where_metal_is_not() -> None:
    plan = mac_plan("s8")
    here = MlxTarget().adapt(plan)
    assert here.memory.runtime_bytes == 41 * MIB < plan.memory.runtime_bytes
    assert (here.memory.scale_bits, here.memory.float_bits) == (32, 32), "the CPU holds scales and floats in 32 bits"
    assert here.memory.tokenizer_bytes == plan.memory.tokenizer_bytes, "what was measured of the tokenizer stays"


@without_metal
@pytest.mark.mlx
@pytest.mark.quantize
def test_opening_an_artifact_for_a_mac_predicts_what_it_takes_here(tmp_path: Path) -> None:
    """150 MiB of Metal's libraries were counted, so that the demo was predicted to take three times its memory."""
    artifact = export(mac_plan("s8"), tmp_path / "mac").folder
    with open_runtime(artifact, context=128, prefixes=0) as runtime:
        report = runtime.memory()
    assert report.predicted.runtime_bytes < 60 * MIB


@pytest.mark.mlx
@pytest.mark.quantize
def test_float32_runs_on_the_cpu(tmp_path: Path) -> None:
    wish = PlanRequest(recipe=named_recipe("float32"), target="mlx", context=128)
    plan = make_plans("demo", ["laptop-x86-8gb"], wish)[0]
    assert (plan.backend, plan.recipe.name) == ("cpu", "float32")
    assert "logits within 2%" in export(plan, tmp_path / "float").manifest.self_check
