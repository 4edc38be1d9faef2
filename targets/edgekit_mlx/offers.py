"""Offers of MLX: Apple's GPUs, and on request the CPU of Linux, to check an export without a Mac."""

from __future__ import annotations

from collections.abc import Iterator

from edgekit.contracts.plan import Plan, SpeedFacts
from edgekit.contracts.recipe import NATIVE_RECIPES, RECIPES, SMALL, Recipe
from edgekit.contracts.target import Offer
from edgekit.model.spec import ModelSpec
from edgekit_mlx.capabilities import capabilities
from edgekit_mlx.config import differences
from edgekit_mlx.memory import facts

_RECIPES = ("float16", "s8", "balanced", "s4-g32", "mixed-4.5", "s4-g64", "s4-g128")

_METAL = SpeedFacts(
    layer_s=0.000138,
    expert_layer_s=0.000042,
    prefill_shares=(("fp16", 0.65), ("fp32", 0.65)),
    float_shares=(("fp16", 0.72), ("fp32", 0.72)),
    spread=(0.75, 1.2),
    source="0.138 ms a layer on an M2 Pro (AlexsJones/llmfit#1031), and what experts add on an M4 Max "
    "(ml-explore/mlx-lm BENCHMARKS.md); never run here on Metal",
)
_CPU = SpeedFacts(
    bandwidth_share=0.05,
    prefill_shares=(("fp32", 0.02),),
    source="measured on Linux: MLX's CPU kernels are fit for checks, not for running a model",
)


def recipes(backend: str) -> Iterator[Recipe]:
    """Yield the recipes to choose from: best quality first, MLX's own formats last."""
    for name in _RECIPES if backend == "metal" else ("float32", *_RECIPES):
        yield RECIPES[name]
    yield SMALL
    if backend == "metal":
        yield from NATIVE_RECIPES.values()


def offer(model: ModelSpec, backend: str, recipe: Recipe) -> Offer:
    """Return the offer in one recipe."""
    on_metal = backend == "metal"
    notes = [
        "never run on Metal; checked on Linux with MLX's CPU backend"
        if on_metal
        else "for checks: MLX's CPU kernels are some fifty times slower than onnx's"
    ]
    if any(layer.delta_rule for layer in model.layers):
        notes.append("its linear layers read a prompt one token after the other, so prompts take longer than predicted")
    if recipe.is_native():
        notes.append("an MLX format, quantised from the float model instead of the neutral weights")
    notes += [f"opened without edgekit: {each}" for each in differences(model, model.max_positions)]
    return Offer(
        target="mlx",
        backend=backend,
        recipe=recipe,
        capabilities=capabilities(model, on_metal=on_metal),
        only_by_name=not on_metal,
        can_be_timed=on_metal,
        memory=facts(model, on_metal=on_metal),
        speed=_METAL if on_metal else _CPU,
        notes=tuple(notes),
    )


def on_this_machine(plan: Plan, *, has_metal: bool) -> Plan:
    """Return the plan with the memory of MLX's CPU backend if it was made for Metal and there is none."""
    if plan.backend != "metal" or has_metal:
        return plan
    read = {name: getattr(plan.memory, name) for name in ("tokenizer_bytes", "tokenizer_reading_bytes")}
    here = facts(plan.model, on_metal=False).model_copy(update=read)
    return plan.model_copy(update={"backend": "cpu", "memory": here})
