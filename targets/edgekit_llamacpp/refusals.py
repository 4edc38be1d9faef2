"""Plans that this target refuses, checked before anything is written or opened."""

from __future__ import annotations

from edgekit.contracts.plan import Plan
from edgekit.errors import Unsupported
from edgekit.model.rope import frequencies
from edgekit.model.spec import ModelSpec
from edgekit.quant.neutral_gguf import refusal

BACKENDS = ("cpu", "metal", "cuda", "vulkan")
MAX_SEQUENCES = 256  # beyond this, llama.cpp aborts the process
KV_BITS = (16, 32, 8, 4)
QUANTISED_KV_HEADS = 64  # an 8- or 4-bit cache rotates its values in blocks of 64
_RUNS_WINDOWS = ("gemma2", "gemma3_text")  # it keeps their windowed layers apart, and ignores windows of others


def refuse_plan(plan: Plan) -> None:
    """Raise `Unsupported` if the plan cannot be exported or opened."""
    reason = _reason(plan)
    if reason:
        raise Unsupported(f"llamacpp: {reason}")


def kv_bits_of(model: ModelSpec) -> tuple[int, ...]:
    """Return the cache widths that this model supports, the usual one first."""
    can_quantise = all(layer.head_dim % QUANTISED_KV_HEADS == 0 for layer in model.layers)
    return KV_BITS if can_quantise else tuple(bits for bits in KV_BITS if bits >= 16)


def can_evict(model: ModelSpec, context: int) -> bool:
    """Return True if tokens can be evicted."""
    return _no_evictions(model, context) is None


def can_save(model: ModelSpec) -> bool:
    """Return True if keys and values can be saved: windowed layers leave out tokens outside their window."""
    return all(layer.window is None for layer in model.layers)


def _reason(plan: Plan) -> str | None:
    model, bits = plan.model, plan.storage.kv_bits
    if model.exportable:
        return model.exportable
    if plan.backend not in BACKENDS:
        return f"no backend {plan.backend!r}; choose one of {', '.join(BACKENDS)}"
    if (plan.gpu_layers or 0) > len(model.layers) + 1:
        return f"{plan.gpu_layers} layers on the GPU; the model has {len(model.layers) + 1} with its head"
    if bits not in kv_bits_of(model):
        known = ", ".join(map(str, kv_bits_of(model)))
        why = f" with heads that {QUANTISED_KV_HEADS} does not divide" if bits in KV_BITS else ""
        return f"kv_bits {bits} is not supported{why}; use one of {known}"
    if plan.exits:
        return f"exits {list(plan.exits)}: it runs all layers; use the onnx target for early exits"
    if plan.drafter is not None:
        return "a drafting head needs hidden states, which it does not give; use the onnx target for --drafter"
    if plan.sequences > MAX_SEQUENCES:
        return f"{plan.sequences} sequences; it runs at most {MAX_SEQUENCES}"
    refused = _no_evictions(model, plan.context)
    if plan.cache.window is not None and refused:
        return f"a window needs evictions, and {refused}; plan without"
    return refusal(model, plan.recipe, plan.context)


def _no_evictions(model: ModelSpec, context: int) -> str | None:
    """Return the reason why tokens cannot be evicted; None if they can."""
    if any(frequencies(rope, context)[1] != 1.0 for rope in model.ropes.values()):
        return "llama.cpp scales the keys of this model's rope once more at each of them"
    if model.family in _RUNS_WINDOWS and all(layer.window is not None for layer in model.layers):
        return "llama.cpp ends the process at the first one if all layers have windows of their own"
    return None
