"""Predicts speed by the roofline: bytes touched a token over bandwidth, operations over compute. Pure arithmetic."""

from __future__ import annotations

from functools import lru_cache

from edgekit.device import DeviceProfile, Number
from edgekit.memory import kv_bytes, stored_weight_bytes
from edgekit.model import ModelSpec, Tensor
from edgekit.plan import MemoryFacts, Speed, SpeedFacts
from edgekit.recipe import Recipe

PROMPT_TOKENS = 512  # a first token is predicted for a prompt of this many tokens, or half the context


def predict(
    model: ModelSpec,
    recipe: Recipe,
    memory: MemoryFacts,
    shares: SpeedFacts,
    device: DeviceProfile,
    *,
    held_tokens: int,
    kv_bits: int,
) -> Speed:
    """Speed of one sequence with the cache half full."""
    weights = touched_weight_bytes(model, recipe, memory)
    cache = kv_bytes(model, held_tokens // 2, kv_bits)
    bandwidth = device.usable_bandwidth_gb_s.value * 1e9 * shares.decode_share
    step_s = (weights + cache) / bandwidth + shares.step_overhead_s
    prompt = max(1, min(PROMPT_TOKENS, held_tokens // 2))
    compute, name = _compute(device, shares)
    prefill = None if compute is None else compute / (2 * active_parameters(model))
    basis = (
        f"decode: {weights / 1e6:,.0f} MB of weights and {cache / 1e6:,.0f} MB of cache a token"
        f" over {bandwidth / 1e9:.3g} GB/s ({device.usable_bandwidth_gb_s.value:g} usable × {shares.decode_share:g})"
    )
    if prefill is not None:
        basis += f"; prefill: {name}; first token after a prompt of {prompt}"
    else:
        basis += "; prefill: the compute of this device is not known"
    return Speed(
        prefill_tokens_per_s=None if prefill is None else _rounded(prefill),
        decode_tokens_per_s=_rounded(1 / step_s),
        first_token_s=None if prefill is None else _rounded(prompt / prefill + step_s),
        basis=basis,
    )


def touched_weight_bytes(model: ModelSpec, recipe: Recipe, memory: MemoryFacts) -> int:
    """Stored weight bytes that one decoded token reads: not the embedding's other rows, not the idle experts."""
    stored = stored_weight_bytes(model, recipe, memory)
    return round(stored * _touched_share(model, recipe))


@lru_cache(maxsize=256)
def _touched_share(model: ModelSpec, recipe: Recipe) -> float:
    sizes = [(tensor, recipe.format_of(tensor).bytes(tensor.shape)) for tensor in model.tensors()]
    return sum(size * _used(model, tensor) for tensor, size in sizes) / sum(size for _, size in sizes)


@lru_cache(maxsize=64)
def active_parameters(model: ModelSpec) -> int:
    """Parameters that one token multiplies with."""
    return max(1, round(sum(tensor.size * _used(model, tensor) for tensor in model.tensors())))


def _used(model: ModelSpec, tensor: Tensor) -> float:
    """What share of a tensor one token reads: one row of an embedding that is no head, the experts that are chosen."""
    if tensor.role == "embedding":
        is_head = model.tied and tensor.shape[-1] == model.hidden_size
        return 1.0 if is_head else 1 / tensor.shape[0]
    if tensor.role == "expert" and model.experts is not None:
        return model.experts.active / model.experts.count
    return 1.0


def _compute(device: DeviceProfile, shares: SpeedFacts) -> tuple[float | None, str]:
    known: dict[str, Number | None] = {
        "int8": device.int8_tops,
        "fp16": device.fp16_tflops,
        "fp32": device.fp32_tflops,
    }
    for kind, share in shares.prefill_shares:
        figure = known[kind]
        if figure is not None:
            return figure.value * 1e12 * share, f"{figure.value:g} T{kind} operations a second × {share:g}"
    return None, ""


def _rounded(value: float) -> float:
    """Three figures: a prediction has no more."""
    return float(f"{value:.3g}")
