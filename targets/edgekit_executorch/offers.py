"""What ExecuTorch can be offered for: XNNPACK on CPUs; CoreML and Vulkan, which were lowered and never run."""

from __future__ import annotations

from collections.abc import Iterator

from edgekit.device import DeviceProfile
from edgekit.interfaces import Offer
from edgekit.model import ModelSpec
from edgekit.plan import MemoryFacts, SpeedFacts
from edgekit.recipe import RECIPES
from edgekit.units import MIB

_RECIPES = {
    "xnnpack": ("float32", "s8", "s4-g32", "s4-g64", "s4-g128"),
    "coreml": ("float16",),
    "vulkan": ("s4-g32", "s4-g64"),
}
_MEMORY = MemoryFacts(
    mapped_share=0.0,
    private_share=1.0,
    runtime_bytes=60 * MIB,
    scale_bits=16,
    float_bits=32,
    activation_bits=32,
    source="measured on x86-64: resident memory grows by the size of the program, nearly all of it private",
)
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
            lowered = backend != "xnnpack"
            yield Offer(
                target="executorch",
                backend=backend,
                recipe=RECIPES[name],
                kv_bits=(16,) if lowered else (32,),
                exits=not lowered,
                memory=_MEMORY,
                speed=_LOWERED if lowered else _XNNPACK,
                notes=(f"{backend} was lowered here and never run",) if lowered else (),
            )
