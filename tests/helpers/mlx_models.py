"""Tiny models as files of the mlx target, made once a session; and engines that hold fewer kinds of state."""

from __future__ import annotations

from typing import Any

import family_models as models
import numpy as np
from edgekit_mlx.export import export
from exported_models import ExportedModels

from edgekit.contracts.engine import Chunk, Engine, State
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy

ONE_LAYER = "one layer"
FAMILIES = models.FAMILIES | models.RECURRENT | models.SHARING | models.EXPERTS | models.HYBRID_EXPERTS
WIDE_HEADS = {**models.SMALL, "head_dim": 64, "num_hidden_layers": 1, "num_key_value_heads": 2}
_MODELS = ExportedModels("mlx", {**FAMILIES, ONE_LAYER: ("llama", WIDE_HEADS)}, export, backend="cpu")
made, reference = _MODELS.made, _MODELS.reference


def expected(family: str, tokens: list[int], recipe: str = "s4-g32") -> np.ndarray[Any, Any]:
    return models.logits_of(reference(family, recipe), tokens)


def apart(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
    """The largest difference, over the largest value."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def tokens_of(count: int, seed: int = 7) -> list[int]:
    return list(models.tokens_of(count, seed=seed))


def holding(engine: Any, *kv_bits: int) -> Any:
    """The same engine, offering only these widths of keys and values."""
    engine.capabilities = engine.capabilities.model_copy(update={"kv_bits": kv_bits})
    return engine


def storage(engine: Any, bits: int, capacity: int | None = None) -> KVCacheConfig:
    return KVCacheConfig(capacity_tokens=capacity or engine.plan.storage.capacity_tokens, kv_bits=bits)


def fed(engine: Engine, state: State, tokens: list[int], sizes: list[int]) -> np.ndarray[Any, Any]:
    """The logits of every token, fed in pieces whose sizes repeat."""
    found, place, turn = [], 0, 0
    while place < len(tokens):
        piece = tokens[place : place + sizes[turn % len(sizes)]]
        found.append(engine.forward([Chunk(state, piece, len(piece))])[0])
        place, turn = place + len(piece), turn + 1
    return np.concatenate(found)


def fed_under(
    engine: Engine, state: State, tokens: list[int], policy: KVEvictionPolicy, size: int
) -> np.ndarray[Any, Any]:
    """Feed as the scheduler does: evict the oldest block before a forward, and cut chunks at that boundary."""
    found, place = [], 0
    while place < len(tokens):
        gone = policy.eviction(state.length)
        if gone:
            state.evict(*gone)
        room = policy.remaining_capacity(state.length)
        piece = tokens[place : place + min(size, room or size)]
        found.append(engine.forward([Chunk(state, piece, len(piece))])[0])
        place += len(piece)
    return np.concatenate(found)
