"""Predicts speed by the roofline: bytes read per token over bandwidth, operations over compute. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

from edgekit.common.units import show_bytes
from edgekit.contracts.device import DeviceProfile, SourcedNumber
from edgekit.contracts.plan import MemoryFacts, Speed, SpeedFacts
from edgekit.contracts.recipe import Recipe
from edgekit.contracts.stored_weights import stored_weight_bytes
from edgekit.contracts.target import Offer
from edgekit.contracts.token_costs import kv_bytes, operations_per_token, touched_weight_bytes
from edgekit.model.spec import ModelSpec

PROMPT_TOKENS = 512  # the prompt before a predicted first token; at most half the context


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
    """Predict the speed of one sequence with the cache half full."""
    weights = touched_weight_bytes(model, recipe, memory)
    cache = kv_bytes(model, held_tokens // 2, kv_bits)
    bandwidth = device.usable_bandwidth_gb_s.value * 1e9 * shares.decode_share
    cache_share = dict(shares.cache_shares).get(kv_bits, 1.0)
    step_s = (weights + cache / cache_share) / bandwidth + shares.step_overhead_s
    prompt = max(1, min(PROMPT_TOKENS, held_tokens // 2))
    compute, name = _compute(device, shares)
    prefill = None if compute is None else compute / operations_per_token(model)
    basis = (
        f"decode: {weights / 1e6:,.0f} MB of weights and {cache / 1e6:,.0f} MB of cache a token"
        f" over {bandwidth / 1e9:.3g} GB/s ({device.usable_bandwidth_gb_s.value:g} usable × {shares.decode_share:g})"
    )
    if cache_share != 1:
        basis += f", the cache of {kv_bits} bits at {cache_share:g} of that"
    if prefill is not None:
        basis += f"; prefill: {name}; first token after a prompt of {prompt}"
    else:
        basis += "; prefill: the compute of this device is not known"
    return Speed(
        prefill_tokens_per_s=None if prefill is None else rounded(prefill),
        decode_tokens_per_s=rounded(1 / step_s),
        first_token_s=None if prefill is None else rounded(prompt / prefill + step_s),
        basis=basis,
    )


def cache_price_notes(
    model: ModelSpec, offer: Offer, device: DeviceProfile, *, held_tokens: int, kv_bits: int
) -> Iterator[str]:
    """Yield the price of a narrow cache that decodes slower than the next wider one of the offer."""
    wider = min((bits for bits in offer.capabilities.kv_bits if bits > kv_bits), default=kv_bits)
    narrow, wide = (
        predict(model, offer.recipe, offer.memory, offer.speed, device, held_tokens=held_tokens, kv_bits=bits)
        for bits in (kv_bits, wider)
    )
    if narrow.decode_tokens_per_s < wide.decode_tokens_per_s:
        yield (
            f"a cache of {kv_bits} bits takes less memory and more time than one of {wider}: "
            f"{narrow.decode_tokens_per_s:g} instead of {wide.decode_tokens_per_s:g} decoded tokens a second"
        )


def touched_notes(model: ModelSpec, recipe: Recipe, memory: MemoryFacts) -> Iterator[str]:
    """Yield a note on the share of a mixture of experts that one token reads."""
    if model.experts is None:
        return
    touched, stored = touched_weight_bytes(model, recipe, memory), stored_weight_bytes(model, recipe, memory)
    layers = sum(layer.experts for layer in model.layers)
    yield (
        f"one token reads {show_bytes(touched)} of {show_bytes(stored)} of weights: {model.experts.active} of "
        f"{model.experts.count} experts in {layers} layers"
    )


def _compute(device: DeviceProfile, shares: SpeedFacts) -> tuple[float | None, str]:
    known: dict[str, SourcedNumber | None] = {
        "int8": device.int8_tops,
        "fp16": device.fp16_tflops,
        "fp32": device.fp32_tflops,
    }
    for kind, share in shares.prefill_shares:
        figure = known[kind]
        if figure is not None:
            return figure.value * 1e12 * share, f"{figure.value:g} T{kind} operations a second × {share:g}"
    return None, ""


def rounded(value: float) -> float:
    """Round to three significant figures, the precision of a prediction."""
    return float(f"{value:.3g}")
