"""What ONNX Runtime can be offered for: the CPU, and CUDA where a wheel for the machine exists."""

from __future__ import annotations

from collections.abc import Iterator

from edgekit.device import DeviceProfile
from edgekit.interfaces import Offer
from edgekit.model import ModelSpec
from edgekit.plan import MemoryFacts, SpeedFacts
from edgekit.recipe import RECIPES
from edgekit.units import KIB, MIB

_RECIPES = ("float16", "s8", "s4-g32", "mixed-4.5", "s4-g64", "s4-g128")
# The arena goes back with a call that asks for rows, once the sizes of calls so far come to more than both: what is
# kept of one size would not serve a larger one, and giving it back takes no time beside reading that many tokens.
KEPT_TOKENS, RETURNED_BYTES = 32, 1 * MIB

_CPU_MEMORY = MemoryFacts(
    mapped_share=1.0,
    private_share=0.0,
    runtime_bytes=45 * MIB + 128 * KIB,
    layer_bytes=118 * KIB,
    opening_share=1.0,
    opening_scale_share=1.46,
    cache_scale_bits=0,
    scale_bits=32,
    bias_bits=32,  # the packed form holds the sum of each block beside its scale
    row_group=128,
    float_bits=32,
    activation_bits=32,
    hidden_copies=8.7,
    inner_copies=2.7,
    head_copies=2.65,
    reuses_activations=False,  # its arena keeps what is free in pieces of the sizes that were asked for
    running_bytes=2 * MIB + 640 * KIB,
    returned_bytes=RETURNED_BYTES,
    verified_tokens=KEPT_TOKENS,
    looked_up_bytes=16 * KIB,  # pages come with their neighbours; text repeats its tokens
    disk_share=3.3,
    source="measured on x86-64 Linux over random models of 0.01 to 1.2 billion weights (examples/memory_contract.py); "
    "weights saved pre-packed are mapped, and that copy takes 2.4 times the artifact",
)
_CPU_SPEED = SpeedFacts(
    decode_share=0.74,
    prefill_shares=(("int8", 0.30), ("fp32", 1.2)),
    step_overhead_s=0.0003,
    source="measured on 2 x86-64 cores with AVX-512 VNNI: 74 % of the read bandwidth, int8 products in prefill",
)
_CUDA_MEMORY = MemoryFacts(
    mapped_share=0.0,
    private_share=1.0,
    runtime_bytes=600 * MIB,
    scale_bits=16,
    row_group=128,
    float_bits=16,
    activation_bits=16,
    source="prior: weights are copied to the device, the CUDA context and libraries take some 600 MiB",
)
_CUDA_SPEED = SpeedFacts(
    decode_share=0.85,
    prefill_shares=(("fp16", 0.40), ("fp32", 0.8)),
    step_overhead_s=0.0004,
    source="prior: never run here",
)


def offers(model: ModelSpec, device: DeviceProfile) -> Iterator[Offer]:
    """Best quality first, the device's own order of backends."""
    for backend in device.targets.get("onnx", ()):
        if backend not in ("cpu", "cuda"):
            continue
        cuda = backend == "cuda"
        names = ("float32", *_RECIPES) if not cuda else _RECIPES
        for name in names:
            yield Offer(
                target="onnx",
                backend=backend,
                recipe=RECIPES[name],
                kv_bits=(16,) if cuda else (32, 8),
                exits=True,
                adapters=True,
                memory=_memory(model, name, cuda),
                speed=_CUDA_SPEED if cuda else _CPU_SPEED,
                refusal=_no_wheel(device, backend),
                notes=("written and checked on the CPU provider; never run on CUDA",) if cuda else (),
            )


def _memory(model: ModelSpec, recipe: str, cuda: bool) -> MemoryFacts:
    facts = _CUDA_MEMORY if cuda else _CPU_MEMORY
    # An s8 row repeats its scale as often as the groups beside it.
    group = {"s4-g32": 32, "s4-g64": 64}.get(recipe, facts.row_group)
    numbers = sum(rope.dim for rope in model.ropes.values())  # a cosine and a sine for each pair that turns
    return facts.model_copy(update={"row_group": group, "position_bytes": 0 if cuda else 4 * numbers})


def _no_wheel(device: DeviceProfile, backend: str) -> str | None:
    if backend == "cuda" and device.os == "macos":
        return "there is no CUDA on macOS; use the mlx target"
    return None
