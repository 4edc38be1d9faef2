"""What this target understands and will not do, each by name. Pure; asked while planning and before lowering."""

from __future__ import annotations

from edgekit.errors import Unsupported
from edgekit.model import ModelSpec
from edgekit.plan import Plan
from edgekit.recipe import Recipe

KV_BITS = {"xnnpack": (32, 8), "coreml": (16,), "vulkan": (32,)}


def refuse_plan(plan: Plan) -> None:
    """Raise unless the plan can be honoured as it stands."""
    if plan.model.exportable:
        raise Unsupported(plan.model.exportable)
    allowed = KV_BITS.get(plan.backend)
    if allowed is None:
        raise Unsupported(f"executorch: backend {plan.backend} is not known; choose one of {', '.join(KV_BITS)}")
    if plan.storage.kv_bits not in allowed:
        raise Unsupported(
            f"executorch: {plan.storage.kv_bits}-bit keys and values on {plan.backend}; "
            f"it holds {' or '.join(map(str, allowed))} bits"
        )
    layers = len(plan.model.layers)
    if plan.exits and plan.backend != "xnnpack":
        raise Unsupported(f"executorch: exits on {plan.backend}; only programs for xnnpack leave early: plan without")
    if any(not 0 < layer < layers for layer in plan.exits):
        raise Unsupported(f"executorch: exits {list(plan.exits)} must lie between layer 1 and layer {layers - 1}")
    if plan.adapter_rank:
        raise Unsupported("executorch: adapters; merge the adapter into the weights before quantising")
    reason = refuse_recipe(plan.model, plan.recipe, plan.backend)
    if reason:
        raise Unsupported(reason)


def refuse_recipe(model: ModelSpec, recipe: Recipe, backend: str) -> str | None:
    """Why a model cannot be stored so on that backend; None when it can."""
    if recipe.is_native():
        return f"executorch: recipe {recipe.name} is another vendor's own format; choose s4-g64 or s8"
    windows = {layer.window for layer in model.layers if layer.window is not None}
    if len(windows) > 1:
        return f"executorch: layers with windows of {sorted(windows)} tokens; one width is supported"
    for tensor in model.tensors():
        stored = recipe.format_of(tensor)
        if tensor.role == "embedding" and stored.kind == "s4":
            return (
                f"executorch: recipe {recipe.name} keeps the table of tokens in 4 bits; 8 bits or floats are supported"
            )
        if backend == "vulkan" and not stored.is_float:
            return f"executorch: recipe {recipe.name} on vulkan, whose passes fail on integers here; choose float32"
    return None


def refuse_weight_only() -> None:
    """XNNPACK of this version accepts weights in integers under activations in floats, and computes nonsense."""
    raise Unsupported(
        "executorch: integer weights with float activations give wrong results in XNNPACK of this version; "
        "lower them with activations rounded to 8 bits, or choose the recipe float32"
    )
