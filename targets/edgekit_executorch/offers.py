"""Offers of ExecuTorch: XNNPACK on CPUs, and CoreML and Vulkan, whose programs were lowered but never run here."""

from __future__ import annotations

from collections.abc import Iterator

from edgekit.common.units import MIB, show_bytes
from edgekit.contracts.device import DeviceProfile
from edgekit.contracts.plan import MemoryFacts, Plan, SpeedFacts
from edgekit.contracts.recipe import RECIPES, Recipe, named_recipe, weight_bytes
from edgekit.contracts.target import Offer
from edgekit.model.spec import ModelSpec
from edgekit_executorch.capabilities import capabilities
from edgekit_executorch.layer_tensors import head_dim_of
from edgekit_executorch.layout import MAX_ROWS

# XNNPACK rounds inputs to 8 bits a token, so the smooth recipe comes before the plain one.
_RECIPES = {
    "xnnpack": ("float32", "float16", "s8", "balanced-smooth", "balanced", "s4-g32", "mixed-4.5", "s4-g64", "s4-g128"),
    "coreml": ("float16", "s4-g32", "s4-g64"),
    "vulkan": ("float32", "s4-g32", "s4-g64"),
}
_PHONES = ("android", "ios")
# Private memory of an open runtime without any model: Python with torch and its operators, or a phone's app.
_ON_DESKTOPS, _ON_PHONES = 299_000_000, 60 * MIB
_MEASURED = "measured on x86-64 Linux, torch and Python included"
_LAYER_BYTES = 120_000  # a layer's part of the program
_ROW_BYTES = 8  # added by packing to each row of a matrix
_COPIES = 3.25
_TOKEN_BITS = 32 + 8  # the scale and zero point of each token of a head in an 8-bit cache
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
        memory=_memory(model, recipe, device, backend),
        speed=_LOWERED if lowered else _XNNPACK,
        notes=_notes(model, recipe, backend) if lowered else (),
    )


def _notes(model: ModelSpec, recipe: Recipe, backend: str) -> tuple[str, ...]:
    never_run = f"{backend} was lowered here and never run"
    if not model.tied:
        return (never_run,)
    looked_up = show_bytes(_table_bytes(model, recipe, backend)[1])
    return (
        never_run,
        f"the tied token embedding takes {looked_up} more, because {backend} stores matrices in its own format",
    )


def _table_bytes(model: ModelSpec, recipe: Recipe, backend: str) -> tuple[int, int]:
    """Return the bytes of the token embedding in the recipe's format, and in the format that the program reads."""
    float_bits = 16 if backend == "coreml" else 32
    table = next(tensor for tensor in model.tensors() if tensor.role == "embedding")
    form, floats = recipe.format_of(table), table.size * float_bits // 8
    stored = floats if form.is_float else form.bytes(table.shape)
    # Only XNNPACK reads an 8-bit embedding; the others store it in floats.
    return stored, stored if backend == "xnnpack" else floats


def on_this_machine(plan: Plan) -> Plan:
    """Return the plan with the memory of Python and torch, which a program made for a phone takes when they run it."""
    if plan.backend != "xnnpack" or plan.memory.runtime_bytes != _ON_PHONES:
        return plan
    facts = plan.memory.model_copy(update={"runtime_bytes": _ON_DESKTOPS, "source": _MEASURED})
    return plan.model_copy(update={"memory": facts})


def _mask_bits(model: ModelSpec) -> int:
    """Return the bits of a mask's value: all windowed layers share one mask of 32 bits, and other layers need none."""
    kinds = {layer.window is None for layer in model.layers}
    return 32 // len(kinds) if False in kinds else 0


def _memory(model: ModelSpec, recipe: Recipe, device: DeviceProfile, backend: str) -> MemoryFacts:
    """Return the memory facts of a program. A tied head shares the embedding's bytes in the file, but is packed too."""
    float_bits = 16 if backend == "coreml" else 32
    # XNNPACK's float linears have 32 bits, whatever the recipe rounds them to.
    stored = weight_bytes(model, RECIPES["float32"] if float_bits == 32 and recipe.is_exact() else recipe)
    table = next(tensor for tensor in model.tensors() if tensor.role == "embedding")
    table_bytes, looked_up = _table_bytes(model, recipe, backend)
    multiplied = stored if model.tied else stored - table_bytes
    if backend != "xnnpack":
        return MemoryFacts(
            mapped_share=0.0,
            private_share=(multiplied + looked_up) / stored,
            runtime_bytes=60 * MIB,
            scale_bits=16,
            float_bits=float_bits,
            activation_bits=float_bits,
            disk_share=(multiplied + looked_up) / stored,
            source="prior: never run",
        )
    on_phone = device.os in _PHONES
    ropes = sum(head_dim_of(model, name) for name in model.ropes)
    rows = sum(tensor.shape[0] for tensor in model.tensors() if tensor.role in ("linear", "head"))
    packed = multiplied + _ROW_BYTES * (rows + table.shape[0] * model.tied)
    return MemoryFacts(
        mapped_share=looked_up / stored,
        private_share=packed / stored,
        runtime_bytes=_ON_PHONES if on_phone else _ON_DESKTOPS,
        layer_bytes=_LAYER_BYTES,
        scale_bits=16,
        float_bits=float_bits,
        activation_bits=float_bits,
        cache_scale_bits=_TOKEN_BITS,
        cache_groups=(),
        widened_bits=32,
        fixed_buffers=True,
        mask_bits=_mask_bits(model),
        hidden_copies=_COPIES,
        inner_copies=_COPIES,
        planned_rows=MAX_ROWS,
        position_bytes=2 * 4 * ropes,
        exit_copies=True,
        disk_share=1.0,
        source="measured on x86-64 Linux; without Python and torch on phones, where it was not run"
        if on_phone
        else _MEASURED,
    )
