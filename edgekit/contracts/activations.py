"""Sizes of activations, shared by the planner and the engines."""

from __future__ import annotations

from functools import lru_cache

from edgekit.contracts.plan import MemoryFacts
from edgekit.model.parts import Layer
from edgekit.model.spec import ModelSpec


def layers_bytes(model: ModelSpec, tokens: int, facts: MemoryFacts) -> int:
    """Return the bytes of the widest layer's intermediates for a chunk of `tokens`."""
    return round(tokens * activation_width(model, facts) * facts.activation_bits / 8)


def residual_bytes(model: ModelSpec, tokens: int, facts: MemoryFacts) -> int:
    """Return the bytes of the residual stream, alive throughout a layer, for a chunk of `tokens`."""
    return round(tokens * facts.hidden_copies * model.hidden_size * facts.activation_bits / 8)


def attention_bytes(model: ModelSpec, tokens: int, cached: int, facts: MemoryFacts, *, exact: bool) -> tuple[int, int]:
    """Return the bytes of the attention masks and of the scores, for a chunk of `tokens` on `cached` tokens."""
    if model.encoder:  # worst case: the chunk is a single text
        windows = {layer.window for layer in model.layers if layer.window is not None}
        return 4 * (model.heads + len(windows)) * tokens * tokens, 0
    kinds = len({layer.window is None for layer in model.layers})
    if not (exact and facts.exact_scores):
        return kinds * tokens * cached * facts.mask_bits // 8, 0
    heads = max(sum(model.qkv_widths(layer)) for layer in model.layers)
    return kinds * tokens * cached * 4, 4 * tokens * (model.heads * cached + 2 * heads)


@lru_cache(maxsize=256)
def activation_width(model: ModelSpec, facts: MemoryFacts) -> float:
    """Return how many values of the largest layer are alive at the same time, per token of a step."""
    heads = max(_mixed_width(model, layer) for layer in model.layers)
    feed_forward = max(layer.intermediate_size or model.intermediate_size for layer in model.layers)
    if model.experts:
        experts = model.experts
        feed_forward = max(feed_forward, experts.active * experts.intermediate_size)
    attending, feeding = facts.head_copies * heads, facts.inner_copies * feed_forward
    # The residual lives through a layer; at any time either attention or the feed-forward is alive too.
    working = max(attending, feeding) if facts.reuses_activations else attending + feeding
    own = model.per_layer_input.size * len(model.layers) if model.per_layer_input else 0
    return facts.hidden_copies * model.hidden_size + facts.own_input_copies * own + working


def _mixed_width(model: ModelSpec, layer: Layer) -> int:
    """Return the output width of a layer's first projections."""
    if layer.conv_taps:
        return 3 * model.hidden_size
    if layer.delta_rule:
        return layer.delta_rule.channels + layer.delta_rule.values
    queries, keys, values = model.qkv_widths(layer)
    return queries * (1 + model.attention_gate) + keys + values
