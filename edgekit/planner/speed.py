"""Predicts speed: a token's bytes over the bandwidth that its engine reaches, times per layer, and its operations."""

from __future__ import annotations

from collections.abc import Iterator

from edgekit.common.units import rounded, show_bytes
from edgekit.contracts.device import DeviceProfile, SourcedNumber
from edgekit.contracts.plan import PROMPT_TOKENS, MemoryFacts, Speed, SpeedFacts
from edgekit.contracts.recipe import Recipe
from edgekit.contracts.stored_weights import stored_weight_bytes
from edgekit.contracts.target import Offer
from edgekit.contracts.token_costs import active_parameters, kv_bytes, operations_per_token, touched_weight_bytes
from edgekit.model.spec import ModelSpec

_ORIGINS = {"measured": "from the bandwidth measured here", "documented": "this chip with another engine"}
# Two phones with one chip and one engine differ by up to 20 % in one table: Galaxy S22 and S22 Ultra, iPhone 15 and
# 15 Plus (huggingface/optimum-executorch README). What is timed here repeats within 10 %.
_SAME_CHIP, _TIMED = (0.8, 1.2), (0.9, 1.1)


def predict(
    model: ModelSpec, offer: Offer, device: DeviceProfile, *, read_tokens: int, prompt_tokens: int, kv_bits: int
) -> Speed:
    """Predict the speed of one sequence with `read_tokens` in the cache, after a prompt of `prompt_tokens`."""
    facts = offer.speed
    weights = touched_weight_bytes(model, offer.recipe, offer.memory)
    cache = kv_bytes(model, read_tokens, kv_bits)
    cache_share = dict(facts.cache_shares).get(kv_bits, 1.0)
    reached, layer_ms = device.engine_figures(offer.target, offer.backend)
    calibrated = device.calibrated(offer.target, offer.backend)
    share = 1.0 if calibrated else facts.bandwidth_share
    bandwidth = reached.value * 1e9 * share
    reading_s = (weights + cache / cache_share) / bandwidth
    compute, name = _compute(device, facts, offer.recipe)
    one_row = 0.0 if compute is None or offer.recipe.is_exact() else compute * facts.row_share
    multiplying_s = 2 * active_parameters(model) / one_row if one_row else 0.0
    layer_s = facts.layer_s if layer_ms is None else layer_ms.value / 1000
    experts = sum(layer.experts for layer in model.layers)
    added_s = layer_s * len(model.layers) + facts.expert_layer_s * experts
    step_s = max(reading_s, multiplying_s) + added_s
    prompt_s = None if compute is None else operations_per_token(model) * prompt_tokens / compute + added_s
    basis = (
        f"decode: {weights / 1e6:,.0f} MB of weights and {cache / 1e6:,.0f} MB of cache a token"
        f" over {bandwidth / 1e9:.3g} GB/s ({reached.value:g} reached × {share:g})"
    )
    if cache_share != 1:
        basis += f", the cache of {kv_bits} bits at {cache_share:g} of that"
    if multiplying_s > reading_s:
        basis += f", but multiplying takes longer: {multiplying_s * 1000:.3g} ms"
    basis += f", and {added_s * 1000:.3g} ms for {len(model.layers)} layers; prefill: "
    basis += f"{name}; first token after a prompt of {prompt_tokens}" if name else "the compute is not known"
    origin, (low, high) = _origin(offer, device, reached)
    return Speed(
        prefill_tokens_per_s=None if prompt_s is None else rounded(prompt_tokens / prompt_s),
        decode_tokens_per_s=rounded(1 / step_s),
        first_token_s=None if prompt_s is None else rounded(prompt_s + step_s),
        decode_range=(rounded(low / step_s), rounded(1 / step_s), rounded(high / step_s)),
        origin=origin,
        basis=f"{basis}; {facts.source}",
    )


def at_half(model: ModelSpec, offer: Offer, device: DeviceProfile, *, held_tokens: int, kv_bits: int) -> Speed:
    """Predict the speed with the cache half full, as plans state it."""
    half, prompt = held_tokens // 2, max(1, min(PROMPT_TOKENS, held_tokens // 2))
    return predict(model, offer, device, read_tokens=half, prompt_tokens=prompt, kv_bits=kv_bits)


def _origin(offer: Offer, device: DeviceProfile, reached: SourcedNumber) -> tuple[str, tuple[float, float]]:
    """Return where a prediction comes from, and the spread of what comes from there."""
    low, high = offer.speed.spread
    if offer.speed.is_timed:
        return "measured on this machine", _TIMED
    if calibrated := device.calibrated(offer.target, offer.backend):
        return "measured on this device with this engine", calibrated
    if any(row.engine == f"{offer.target}.{offer.backend}" for row in device.measured):
        return "published for this chip and engine", _SAME_CHIP
    if reached.confidence == "recalled":  # nobody published it, so it may be off as much again
        return "from memory", (low**2, high**2)
    return _ORIGINS.get(reached.confidence, "a share of another chip's bandwidth"), (low, high)


def cache_price_notes(
    model: ModelSpec, offer: Offer, device: DeviceProfile, *, held_tokens: int, kv_bits: int
) -> Iterator[str]:
    """Yield the price of a narrow cache that decodes slower than the next wider one of the offer."""
    wider = min((bits for bits in offer.capabilities.kv_bits if bits > kv_bits), default=kv_bits)
    narrow, wide = (at_half(model, offer, device, held_tokens=held_tokens, kv_bits=bits) for bits in (kv_bits, wider))
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


def _compute(device: DeviceProfile, facts: SpeedFacts, recipe: Recipe) -> tuple[float | None, str]:
    """Return the operations a second of prefill, in the type that the kernels of this recipe multiply."""
    known: dict[str, SourcedNumber | None] = {
        "int8": device.int8_tops,
        "fp16": device.fp16_tflops,
        "fp32": device.fp32_tflops,
    }
    for kind, share in facts.float_shares if facts.float_shares and recipe.is_exact() else facts.prefill_shares:
        figure = known[kind]
        if figure is not None:
            return figure.value * 1e12 * share, f"{figure.value:g} T{kind} operations a second × {share:g}"
    return None, ""
