"""Offers of ExecuTorch: XNNPACK on CPUs, and CoreML and Vulkan, whose programs were lowered but never run here."""

from __future__ import annotations

from collections.abc import Iterator

from edgekit.common.units import show_bytes
from edgekit.contracts.device import DeviceProfile
from edgekit.contracts.plan import Plan, SpeedFacts
from edgekit.contracts.recipe import Recipe, named_recipe
from edgekit.contracts.target import Offer
from edgekit.model.spec import ModelSpec
from edgekit_executorch.capabilities import capabilities
from edgekit_executorch.memory import MEASURED, ON_DESKTOPS, ON_PHONES, facts, table_bytes

# XNNPACK rounds inputs to 8 bits a token, so the smooth recipe comes before the plain one.
_RECIPES = {
    "xnnpack": ("float32", "float16", "s8", "balanced-smooth", "balanced", "s4-g32", "mixed-4.5", "s4-g64", "s4-g128"),
    "coreml": ("float16", "s4-g32", "s4-g64"),
    "vulkan": ("float32", "s4-g32", "s4-g64"),
}
_WIDE = "XNNPACK stores float16 in 32 bits, at half the speed; s8 takes a quarter of the bytes"
_XNNPACK = SpeedFacts(
    bandwidth_share=0.93,
    layer_s=0.00007,
    prefill_shares=(("int8", 0.18), ("fp32", 0.7)),
    float_shares=(("fp32", 0.36),),
    row_share=0.34,
    cache_shares=((8, 0.17),),  # measured on x86-64: 1.54 times as long for 0.27 of the bytes
    spread=(0.6, 1.35),
    source="Llama-3.2 1B and 3B, 8da4w and bf16, on a OnePlus 12 (pytorch/executorch examples/models/llama/README.md); "
    "0.06 to 0.08 ms a layer on a Galaxy S22 (huggingface/optimum-executorch README); phones were not run by us",
)
_LOWERED = SpeedFacts(
    bandwidth_share=0.70,
    spread=(0.4, 1.5),
    prefill_shares=(("fp16", 0.20), ("fp32", 0.3)),
    source="prior: never run",
)


def recipes(device: DeviceProfile, backend: str) -> Iterator[Recipe]:
    """Yield the recipes to choose from, best quality first."""
    for name in _RECIPES[backend]:
        # XNNPACK stores it in 32 bits; where CoreML can be had, it stores 16.
        if (backend, name) != ("xnnpack", "float16") or "coreml" not in device.targets.get("executorch", ()):
            yield named_recipe(name)


def offer(model: ModelSpec, device: DeviceProfile, backend: str, recipe: Recipe) -> Offer:
    """Return the offer in one recipe."""
    lowered = backend != "xnnpack"
    return Offer(
        target="executorch",
        backend=backend,
        recipe=recipe,
        capabilities=capabilities(model, recipe, backend),
        memory=facts(device, backend),
        speed=_LOWERED if lowered else _XNNPACK,
        notes=_notes(model, recipe, backend) if lowered else (_WIDE,) if recipe.name == "float16" else (),
    )


def _notes(model: ModelSpec, recipe: Recipe, backend: str) -> tuple[str, ...]:
    never_run = f"{backend} was lowered here and never run"
    if not model.tied:
        return (never_run,)
    looked_up = show_bytes(table_bytes(model, recipe, backend)[1])
    return (
        never_run,
        f"the tied token embedding takes {looked_up} more, because {backend} stores matrices in its own format",
    )


def on_this_machine(plan: Plan) -> Plan:
    """Return the plan with the memory of Python and torch, which a program made for a phone takes when they run it."""
    if plan.backend != "xnnpack" or plan.memory.runtime_bytes != ON_PHONES:
        return plan
    here = plan.memory.model_copy(update={"runtime_bytes": ON_DESKTOPS, "source": MEASURED})
    return plan.model_copy(update={"memory": here})
