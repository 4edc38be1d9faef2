"""Predicts the memory that scoring takes in windows that keep tokens by scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekit.contracts.activations import layers_bytes

if TYPE_CHECKING:
    from edgekit.contracts.kv_policy import KVEvictionPolicy
    from edgekit.contracts.plan import MemoryFacts
    from edgekit.model.spec import ModelSpec

_FLOAT = 4
_HEAD_COPIES = 4  # float copies of a head's keys or values: 3.03 were measured, of 16 bits
# What a layer's graph with outputs of attention adds to a plain one: 14 and 60 KiB were measured with a cache of 32 and
# 16 bits, around which each layer converts.
_ATTENDING_BYTES, _CONVERTING_BYTES = 14 << 10, 46 << 10


def scoring_bytes(
    model: ModelSpec, policy: KVEvictionPolicy | None, facts: MemoryFacts, *, kv_bits: int, sequences: int
) -> int:
    """Return the bytes of scoring the tokens of a full window; 0 for other policies."""
    if policy is None or policy.window is None or not policy.is_scored:
        return 0
    from edgekit.enginekit.keeping import ByAttention, scorers  # loads numpy, which only windows by scores need

    scorer = scorers().get(policy.keep)
    if not isinstance(scorer, ByAttention):
        return _HEAD_COPIES * _FLOAT * policy.window * max(layer.head_dim for layer in model.layers)
    newest, caching = min(scorer.newest, policy.block), [layer for layer in model.layers if layer.stores_kv]
    # Of one layer at a time: the weights, their copy that leaves the operator, and that as float.
    weights = model.heads * newest * policy.window * (2 * kv_bits // 8 + _FLOAT)
    sums = 2 * _FLOAT * model.heads * len(caching) * policy.window
    computed = newest * sum(2 * layer.kv_heads * layer.head_dim for layer in caching) * kv_bits // 8
    graph = facts.layer_bytes + _ATTENDING_BYTES + (_CONVERTING_BYTES if kv_bits < 32 else 0)
    graphs = graph * len(model.layers) + (facts.deriving_bytes if kv_bits >= 32 else 0)
    # Measured on SmolLM2, a window of 512: 8.3 and 14.1 MiB for SnapKV with 16 and 32 bits.
    return weights + sums + computed + graphs + layers_bytes(model, newest, facts)
