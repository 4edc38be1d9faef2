"""Layers on a GPU: how many a plan puts there, and what it then counts on each side."""

from __future__ import annotations

from typing import Any

import pytest

from edgekit.common.units import MIB
from edgekit.contracts.device import DeviceProfile, SourcedBytes
from edgekit.contracts.plan import Plan
from edgekit.device.load import load_profile
from edgekit.errors import DoesNotFit
from edgekit.planner.gpu_layers import describe, most_layers
from edgekit.planner.make import make_plans
from edgekit.planner.memory import with_facts
from edgekit.planner.request import PlanRequest
from edgekit.runtime.memory.admission import RunConfig, estimate_of


def plan_on(device: str | DeviceProfile, **request: Any) -> Plan:
    (plan,) = make_plans("demo", [device], PlanRequest(target="llamacpp", **request))
    return plan


def card(mebibytes: float) -> DeviceProfile:
    """A graphics card with this much memory for models."""
    profile, reserve = load_profile("rtx-4060"), load_profile("rtx-4060").reserve
    vram = SourcedBytes(value=reserve.value + round(mebibytes * MIB), source="a test", confidence="recalled")
    return profile.model_copy(update={"vram": vram})


def test_all_layers_run_on_a_gpu_that_holds_them() -> None:
    plan = plan_on("rtx-4060")
    assert plan.backend == "cuda" and plan.gpu_layers == most_layers(plan.model) == 7
    assert plan.estimate.kv_bytes == 0 and plan.estimate.private_weights_bytes == 0
    assert describe(plan) == "7 of 7 (cuda; never run by us)"


def test_a_smaller_gpu_takes_the_most_layers_that_fit() -> None:
    numbers = []
    for mebibytes in (4, 16, 18, 20, 22, 24, 26):
        plan = plan_on(card(mebibytes))
        room, layers = round(mebibytes * MIB), plan.gpu_layers
        assert layers is not None and plan.estimate.gpu_bytes is not None and plan.estimate.gpu_bytes <= room
        if layers < most_layers(plan.model):
            with pytest.raises(DoesNotFit, match="on the GPU"):
                plan_on(card(mebibytes), gpu_layers=layers + 1, context=plan.context, kv_bits=plan.storage.kv_bits)
        numbers.append(layers)
    assert numbers == sorted(numbers) and numbers[0] == 0 and numbers[-1] == 7 and len(set(numbers)) > 3


def test_memory_is_divided_and_nothing_of_it_is_lost() -> None:
    none, half, every = (plan_on("rtx-4060", gpu_layers=layers) for layers in (0, 4, 7))
    assert none.estimate.gpu_bytes == 0
    assert none.estimate.kv_bytes == 2 * half.estimate.kv_bytes > every.estimate.kv_bytes == 0
    for plan in (half, every):
        assert plan.estimate.gpu_bytes is not None
        # The tied embedding and the buffers are on both sides; copies for the processor's kernels on neither.
        held = plan.estimate.gpu_bytes - plan.estimate.activation_bytes + plan.estimate.kv_bytes
        held += plan.estimate.mapped_weights_bytes
        assert held > none.estimate.kv_bytes + none.estimate.mapped_weights_bytes
    assert every.estimate.total_bytes < half.estimate.total_bytes < none.estimate.total_bytes


def test_metal_maps_the_layers_and_others_copy_them_into_shared_memory() -> None:
    metal, jetson = plan_on("mac-mini-m4-16gb"), plan_on("jetson-orin-nano-8gb")
    assert metal.backend == "metal" and jetson.backend == "cuda"
    for plan in (metal, jetson):
        assert plan.gpu_layers == 7 and plan.estimate.gpu_bytes is None and plan.estimate.kv_bytes > 0
    assert metal.estimate.private_weights_bytes == 0 < jetson.estimate.private_weights_bytes
    assert jetson.estimate.mapped_weights_bytes < metal.estimate.mapped_weights_bytes


@pytest.mark.parametrize(
    ("device", "layers", "allowed"),
    [("laptop-x86-8gb", 1, "at most 0"), ("rtx-4060", 8, "at most 7"), ("mac-mini-m4-16gb", 9, "at most 7")],
)
def test_a_number_that_is_impossible_is_refused(device: str, layers: int, allowed: str) -> None:
    with pytest.raises(DoesNotFit, match=f"GPU layers {layers}, allowed {allowed}"):
        plan_on(device, gpu_layers=layers)


def test_other_targets_refuse_gpu_layers() -> None:
    for layers in (0, 1):  # none is a choice too, which onnx on CUDA would not follow
        with pytest.raises(DoesNotFit, match=f"GPU layers {layers}, allowed only where the target divides layers"):
            make_plans("demo", ["rtx-4060"], PlanRequest(target="onnx", gpu_layers=layers))


def test_a_processor_alone_has_no_gpu_layers() -> None:
    plan = plan_on("laptop-x86-8gb")
    assert plan.gpu_layers == 0 and plan.estimate.gpu_bytes is None and describe(plan) is None


def test_the_runtime_and_a_changed_plan_divide_alike() -> None:
    plan = plan_on("rtx-4060", gpu_layers=3)
    run = RunConfig(kv_config=plan.storage, policy=plan.cache, sequences=plan.sequences)
    assert estimate_of(plan, run) == plan.estimate
    assert with_facts(plan, plan.memory).estimate == plan.estimate
    alone = plan.model_copy(update={"gpu_layers": 0})
    assert estimate_of(alone, run).private_bytes > plan.estimate.private_bytes


def test_a_plan_from_before_gpu_layers_still_opens() -> None:
    plan = plan_on("laptop-x86-8gb")
    text = plan.model_dump(
        mode="json", exclude={"gpu_layers": True, "estimate": {"gpu_bytes"}, "memory": {"gpu_memory"}}
    )
    assert Plan.model_validate_json(__import__("json").dumps(text)).gpu_layers is None
