"""What MLX can be offered for: Apple's GPUs, and the CPU on Linux for tests."""

from __future__ import annotations

from collections.abc import Iterator

from edgekit.device import DeviceProfile
from edgekit.interfaces import Offer
from edgekit.model import ModelSpec
from edgekit.plan import MemoryFacts, SpeedFacts
from edgekit.recipe import NATIVE_RECIPES, RECIPES
from edgekit.units import MIB

_RECIPES = ("float16", "s8", "s4-g32", "mixed-4.5", "s4-g64", "s4-g128")

_MEMORY = MemoryFacts(
    mapped_share=0.0,
    private_share=1.0,
    runtime_bytes=150 * MIB,
    scale_bits=16,
    bias_bits=16,
    row_group=128,
    float_bits=16,
    activation_bits=16,
    source="prior: weights live in unified memory as private buffers; scale and bias of 16 bits each",
)
_METAL = SpeedFacts(
    decode_share=0.90,
    prefill_shares=(("fp16", 0.60), ("fp32", 0.9)),
    step_overhead_s=0.0005,
    source="prior from mlx-lm's published benchmarks on M4 Max; never run here on Metal",
)
_CPU = SpeedFacts(
    decode_share=0.05,
    prefill_shares=(("fp32", 0.02),),
    source="measured on Linux: MLX's CPU kernels are for checking, not for speed",
)


def offers(model: ModelSpec, device: DeviceProfile) -> Iterator[Offer]:
    """Best quality first; native formats last."""
    for backend in device.targets.get("mlx", ()):
        if backend not in ("metal", "cpu"):
            continue
        metal = backend == "metal"
        recipes = [*(RECIPES[name] for name in _RECIPES), *NATIVE_RECIPES.values()]
        for recipe in recipes:
            notes = ["never run on Metal; checked on Linux with MLX's CPU backend"] if metal else []
            if recipe.is_native():
                notes.append("an MLX format quantised from the float model: it leaves the common weights")
            yield Offer(
                target="mlx",
                backend=backend,
                recipe=recipe,
                kv_bits=(16, 8, 4) if metal else (32, 8, 4),
                exits=True,
                adapters=True,
                memory=_MEMORY,
                speed=_METAL if metal else _CPU,
                notes=tuple(notes),
            )
