"""Plans and recipes that this target refuses, checked while planning and before lowering."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import Recipe
from edgekit.contracts.recurrent import is_recurrent
from edgekit.errors import Unsupported
from edgekit.model.spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KV_BITS = {"xnnpack": (32, 8), "coreml": (16,), "vulkan": (32,)}


def refuse_plan(plan: Plan) -> None:
    """Raise `Unsupported` if the plan cannot be exported."""
    if plan.model.exportable:
        raise Unsupported(plan.model.exportable)
    if plan.model.encoder:
        raise Unsupported(f"executorch: {plan.model.family} is an encoder; plan for onnx on the CPU")
    allowed = KV_BITS.get(plan.backend)
    if allowed is None:
        raise Unsupported(f"executorch: backend {plan.backend} is not known; choose one of {', '.join(KV_BITS)}")
    if plan.storage.kv_bits not in allowed:
        raise Unsupported(
            f"executorch: {plan.storage.kv_bits}-bit keys and values on {plan.backend} are not supported; "
            f"plan with --kv-bits {' or '.join(map(str, allowed))}"
        )
    layers = len(plan.model.layers)
    if plan.exits and plan.backend != "xnnpack":
        raise Unsupported(f"executorch: exits on {plan.backend} are not supported; plan without --exit, or for xnnpack")
    if any(not 0 < layer < layers for layer in plan.exits):
        raise Unsupported(f"executorch: exits {list(plan.exits)} must lie between layer 1 and layer {layers - 1}")
    if plan.drafter is not None and plan.backend != "xnnpack":
        raise Unsupported(
            f"executorch: hidden states for a drafting head on {plan.backend} are not supported; plan without "
            "--drafter, or for xnnpack"
        )
    if plan.adapter_rank:
        raise Unsupported("executorch: adapters are not supported; merge the adapter into the float weights")
    reason = refuse_recipe(plan.model, plan.recipe, plan.backend)
    if reason:
        raise Unsupported(reason)


def refuse_recipe(model: ModelSpec, recipe: Recipe, backend: str) -> str | None:
    """Return the reason why a recipe cannot be exported for a backend; None if it can."""
    if recipe.is_native():
        return f"executorch: recipe {recipe.name} is another vendor's own format; choose s4-g64 or s8"
    if is_recurrent(model):
        lacking = (
            "memory of a delta rule" if any(layer.delta_rule for layer in model.layers) else "convolution's inputs"
        )
        return (
            f"executorch: the recurrent layers of {model.family} are not supported: its programs keep keys and values "
            f"between calls, and no {lacking}; choose onnx or mlx"
        )
    if model.layer_scalars:
        return (
            f"executorch: the layers of {model.family} are not supported: its programs give every layer a cache of its "
            "own, and have no second table of embeddings; choose onnx"
        )
    if model.experts:
        return (
            f"executorch: the experts of {model.family} are not supported: no operator of it multiplies a token with "
            "the experts that it chooses; choose onnx or mlx"
        )
    windows = {layer.window for layer in model.layers if layer.window is not None}
    if len(windows) > 1:
        return f"executorch: layers have windows of {sorted(windows)} tokens, and only one width is supported"
    for tensor in model.tensors():
        stored = recipe.format_of(tensor)
        if tensor.role == "embedding" and stored.kind == "s4":
            return f"executorch: recipe {recipe.name} has a 4-bit token embedding; 8 bits or floats are supported"
        in_groups = stored.kind == "s4" or stored.group is not None
        if stored.scales and in_groups and (stored.kind == "s8" or stored.scales != "bfloat16"):
            return (
                f"executorch: {tensor.module} keeps {stored} with scales in {stored.scales} ({recipe.keeps}); XNNPACK "
                "holds groups of 4 bits with positive bfloat16 scales: choose onnx or mlx, or --recipe s8, which "
                "rounds the weights again"
            )
        if backend == "vulkan" and not stored.is_float:
            return f"executorch: recipe {recipe.name} on vulkan: it runs no integer weights yet; choose float32"
    return None


def refuse_scales(module: str, scales: NDArray[np.float32]) -> None:
    """Refuse scales that XNNPACK does not accept: negative ones and zero, which other tools write."""
    if not (scales > 0).all():
        raise Unsupported(
            f"executorch: {module} has {int((scales <= 0).sum()):,} scales that are negative or zero, which XNNPACK "
            "refuses; choose onnx or mlx, or --recipe s8, which rounds the weights again"
        )


def refuse_weight_only() -> None:
    """Refuse integer weights with float activations, because this version of XNNPACK computes wrong results."""
    raise Unsupported(
        "executorch: integer weights with float activations give wrong results in XNNPACK of this version; "
        "lower them with activations rounded to 8 bits, or choose the recipe float32"
    )
