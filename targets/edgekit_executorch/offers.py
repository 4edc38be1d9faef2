"""What ExecuTorch can be offered for: XNNPACK on CPUs; CoreML and Vulkan, which were lowered and never run."""

from __future__ import annotations

from collections.abc import Iterator

from edgekit.device import DeviceProfile
from edgekit.interfaces import Offer
from edgekit.model import ModelSpec
from edgekit.plan import MemoryFacts, SpeedFacts
from edgekit.recipe import RECIPES, Recipe, weight_bytes
from edgekit.units import MIB
from edgekit_executorch.refusals import KV_BITS, refuse_recipe

_RECIPES = {
    "xnnpack": ("float32", "s8", "s4-g32", "s4-g64", "s4-g128"),
    "coreml": ("float16", "s4-g32", "s4-g64"),
    "vulkan": ("float32", "s4-g32", "s4-g64"),
}
_PACKING = 1.035
_XNNPACK = SpeedFacts(
    decode_share=0.60,
    prefill_shares=(("int8", 0.15), ("fp32", 0.6)),
    source="measured on x86-64 (0.5 B, 8da4w); phones were not run",
)
_LOWERED = SpeedFacts(
    decode_share=0.50,
    prefill_shares=(("fp16", 0.20), ("fp32", 0.3)),
    source="prior: never run",
)


def offers(model: ModelSpec, device: DeviceProfile) -> Iterator[Offer]:
    """Best quality first, the device's own order of backends."""
    for backend in device.targets.get("executorch", ()):
        for name in _RECIPES.get(backend, ()):
            recipe, lowered = RECIPES[name], backend != "xnnpack"
            yield Offer(
                target="executorch",
                backend=backend,
                recipe=recipe,
                kv_bits=KV_BITS[backend],
                can_evict=not lowered,
                exits=not lowered,
                memory=_memory(model, recipe, backend),
                speed=_LOWERED if lowered else _XNNPACK,
                refusal=refuse_recipe(model, recipe, backend),
                notes=(f"{backend} was lowered here and never run",) if lowered else (),
            )


def _memory(model: ModelSpec, recipe: Recipe, backend: str) -> MemoryFacts:
    """A tied head stands in the file twice: as the table that tokens are looked up in, and as a product's matrix."""
    float_bits = 16 if backend == "coreml" else 32
    stored = weight_bytes(model, recipe)
    table = next(tensor for tensor in model.tensors() if tensor.role == "embedding")
    form = recipe.format_of(table)
    once = table.size * float_bits // 8 if form.is_float else form.bytes(table.shape)
    # Only XNNPACK looks tokens up in 8 bits; the others keep that table in floats.
    looked_up = once if backend == "xnnpack" else table.size * float_bits // 8
    share = (stored + (looked_up if model.tied else looked_up - once)) / stored
    return MemoryFacts(
        mapped_share=0.0,
        private_share=share * _PACKING,
        runtime_bytes=60 * MIB,
        scale_bits=16,
        float_bits=float_bits,
        activation_bits=float_bits,
        disk_share=share,
        source="measured on x86-64 (0.5 B): packed copies take 3.5 % more than the program's weights, all private",
    )
