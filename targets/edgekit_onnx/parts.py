"""What the files of an artifact are, as a function of its plan: exporter, engine and audit agree on it."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from edgekit.plan import Plan

# Room for the tokens that exact mode feeds beside the real ones, in the tables and in the cache.
SPARE_TOKENS = 2
CACHE_BITS: dict[str, tuple[int, ...]] = {"cpu": (32, 16, 8), "cuda": (16,)}

HEAD = "head"  # the last norm and the logits


class Part(NamedTuple):
    """Layers `start` to `stop` in one graph; `stop` is where an early exit may leave."""

    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"body-{self.start}-{self.stop}"


def parts_of(plan: Plan) -> list[Part]:
    """The body, cut at every exit."""
    cuts = [0, *sorted(set(plan.exits)), len(plan.model.layers)]
    return [Part(start, stop) for start, stop in pairwise(cuts)]


def table_rows(plan: Plan) -> int:
    """Positions that the rotary tables hold: as many as a state, and the spare ones."""
    return plan.storage.capacity_tokens + SPARE_TOKENS


def can_build(plan: Plan) -> str | None:
    """Why this plan cannot be built; None when it can."""
    model = plan.model
    if model.exportable:
        return model.exportable
    if plan.backend not in CACHE_BITS:
        return f"onnx: no backend {plan.backend!r}; it has {', '.join(CACHE_BITS)}"
    if plan.storage.kv_bits not in CACHE_BITS[plan.backend]:
        allowed = " or ".join(map(str, CACHE_BITS[plan.backend]))
        return f"onnx on {plan.backend}: kv_bits {plan.storage.kv_bits} is not supported; use {allowed}"
    if plan.recipe.is_native():
        return f"onnx: recipe {plan.recipe.name} is another vendor's own format; choose an s4, s8 or float recipe"
    if any(not 0 < layer < len(model.layers) for layer in plan.exits):
        return f"onnx: exits {plan.exits} must lie between layer 1 and layer {len(model.layers) - 1}"
    if model.activation not in ("silu", "gelu_tanh", "gelu"):
        return f"onnx: the activation {model.activation} is not written; plan another target"
    if model.experts is not None or any(not layer.stores_kv for layer in model.layers):
        return f"onnx: {model.family} has experts or shared keys and values, which this exporter does not write"
    return None
