"""What this target can do with a model, and the models and recipes that it refuses."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from edgekit.contracts.capabilities import Capabilities, Feature
from edgekit.contracts.recipe import Recipe, tensors_alike
from edgekit.enginekit.keeping import CACHE, scorers_for
from edgekit.errors import Unsupported
from edgekit.model.spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KV_BITS = {"xnnpack": (32, 8), "coreml": (16,), "vulkan": (32,)}


def capabilities(model: ModelSpec, recipe: Recipe, backend: str) -> Capabilities:
    """Return what a backend can do with the model in this recipe."""
    on_xnnpack, family = backend == "xnnpack", model.family
    features: frozenset[Feature] = frozenset({"evictions", "exits", "drafting heads"} if on_xnnpack else ())
    lacking = "memory of a delta rule" if any(layer.delta_rule for layer in model.layers) else "convolution's inputs"
    return Capabilities(
        vocabulary=model.vocab_size,
        kv_bits=KV_BITS[backend],
        refusal=_refusal(model, recipe, backend),
        features=features,
        why_not={
            "encoders": f"{family} is an encoder; plan for onnx on the CPU",
            "recurrent layers": f"the recurrent layers of {family} are not supported: its programs keep keys and "
            f"values between calls, and no {lacking}; choose onnx or mlx",
            "per-layer embeddings": f"the layers of {family} are not supported: its programs give every layer a cache "
            "of its own, and have no second table of embeddings; choose onnx",
            "experts": f"the experts of {family} are not supported: no operator of it multiplies a token with the "
            "experts that it chooses; choose onnx or mlx",
            "exits": f"exits on {backend} are not supported; plan without --exit, or for xnnpack",
            "drafting heads": f"hidden states for a drafting head on {backend} are not supported; plan without "
            "--drafter, or for xnnpack",
        },
        can_save_evicted=on_xnnpack,
        scorers=scorers_for(CACHE) if on_xnnpack else (),
        exact="on_request",
    )


@lru_cache(maxsize=64)
def _refusal(model: ModelSpec, recipe: Recipe, backend: str) -> str | None:
    """Return the reason why the model cannot be exported in this recipe; None if it can."""
    if recipe.is_rare():
        return f"recipe {recipe.name} has a format that only other engines hold; choose s4-g64 or s8"
    windows = {layer.window for layer in model.layers if layer.window is not None}
    if len(windows) > 1:
        return f"layers have windows of {sorted(windows)} tokens, and only one width is supported"
    for tensor, stored, _ in tensors_alike(model, recipe):
        if tensor.role == "embedding" and stored.kind == "s4":
            return f"recipe {recipe.name} has a 4-bit token embedding; 8 bits or floats are supported"
        in_groups = stored.kind == "s4" or stored.group is not None
        if stored.scales and in_groups and (stored.kind == "s8" or stored.scales != "bfloat16"):
            return (
                f"{tensor.module} keeps {stored} with scales in {stored.scales} ({recipe.keeps}); XNNPACK "
                "holds groups of 4 bits with positive bfloat16 scales: choose onnx or mlx, or --recipe s8, which "
                "rounds the weights again"
            )
        if backend == "vulkan" and not stored.is_float:
            return f"recipe {recipe.name} on vulkan: it runs no integer weights yet; choose float32"
    return None


def refuse_scales(module: str, scales: NDArray[np.float32]) -> None:
    """Refuse scales that XNNPACK does not accept: negative ones and zero, which other tools write."""
    if not (scales > 0).all():
        raise Unsupported(
            f"executorch: {module} has {int((scales <= 0).sum()):,} scales that are negative or zero, which XNNPACK "
            "refuses; choose onnx or mlx, or --recipe s8, which rounds the weights again"
        )
