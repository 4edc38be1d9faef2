"""Offers of MLX: Apple's GPUs, and on request the CPU of Linux, to check an export without a Mac."""

from __future__ import annotations

from collections.abc import Iterator

from edgekit.common.units import MIB
from edgekit.contracts.neutral import is_module
from edgekit.contracts.plan import MemoryFacts, Plan, SpeedFacts
from edgekit.contracts.recipe import NATIVE_RECIPES, RECIPES, Recipe
from edgekit.contracts.recurrent import is_recurrent
from edgekit.contracts.target import Offer
from edgekit.model.spec import ModelSpec
from edgekit_mlx.capabilities import capabilities
from edgekit_mlx.config import differences
from edgekit_mlx.layout import GROUPS

_RECIPES = ("float16", "s8", "balanced", "s4-g32", "mixed-4.5", "s4-g64", "s4-g128")

_PAGE_BYTES = 16 << 10  # of Apple's systems; a row begins and ends inside pages
_METAL_RUNTIME_BYTES, _CPU_RUNTIME_BYTES = 150 * MIB, 41 * MIB

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
    if backend == "metal":
        yield from NATIVE_RECIPES.values()


def offer(model: ModelSpec, backend: str, recipe: Recipe) -> Offer:
    """Return the offer in one recipe."""
    on_metal = backend == "metal"
    notes = [
        "never run on Metal; checked on Linux with MLX's CPU backend"
        if on_metal
        else "for checks: MLX's CPU kernels are some fifty times slower than those of onnx"
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
        memory=_memory(model, on_metal),
        speed=_METAL if on_metal else _CPU,
        notes=tuple(notes),
    )


def _memory(model: ModelSpec, on_metal: bool) -> MemoryFacts:
    bits = 16 if on_metal else 32
    return MemoryFacts(
        mapped_share=0.0,
        private_share=1.0,
        runtime_bytes=_METAL_RUNTIME_BYTES if on_metal else _CPU_RUNTIME_BYTES,
        scale_bits=bits,
        bias_bits=bits,
        row_group=_row_group(model),
        float_bits=bits,
        own_row_bytes=_PAGE_BYTES,
        activation_bits=2 * bits,
        reuses_activations=not is_recurrent(model),
        # Fitted to Qwen3.5-0.8B, whose queries, keys and values also pass a convolution.
        head_copies=2.75 if any(layer.delta_rule for layer in model.layers) else 2.0,
        source="weights and caches: the sizes of MLX's own arrays, equal to its counters on Linux; activations twice, "
        "as MLX holds them on Linux until a layer is done, in hybrid models of both its halves; interpreter and "
        "libraries: "
        + ("a prior for macOS" if on_metal else "measured on Linux, private memory of three models less all others"),
    )


def _row_group(model: ModelSpec) -> int:
    """Return the group for which an s8 row's scale is repeated: the largest that divides every input size."""
    inputs = {tensor.shape[-1] for tensor in model.tensors() if is_module(tensor)}
    return next((group for group in GROUPS if all(each % group == 0 for each in inputs)), GROUPS[-1])


def on_this_machine(plan: Plan, *, has_metal: bool) -> Plan:
    """Return the plan with the memory of MLX's CPU backend if it was made for Metal and there is none."""
    if plan.backend != "metal" or has_metal:
        return plan
    planned = plan.memory
    facts = _memory(plan.model, on_metal=False).model_copy(
        update={
            "tokenizer_bytes": planned.tokenizer_bytes,
            "tokenizer_reading_bytes": planned.tokenizer_reading_bytes,
        }
    )
    return plan.model_copy(update={"memory": facts})
