"""Tiny models as files of the mlx target, made once a session; and engines that hold fewer kinds of state."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import family_models as models
import numpy as np
from edgekit_mlx.export import export

from edgekit.cache import CachePolicy, Storage
from edgekit.interfaces import Chunk, Engine, State
from edgekit.plan import Plan
from edgekit.weights.neutral import NeutralWeights

FAMILIES = models.FAMILIES
ONE_LAYER = "one layer"
WIDE_HEADS = {**models.SMALL, "head_dim": 64, "num_hidden_layers": 1, "num_key_value_heads": 2}
_FOLDER = tempfile.TemporaryDirectory(prefix="mlx-models-")


class Made(NamedTuple):
    """An exported model, and what it was made of."""

    plan: Plan
    files: Path
    weights: NeutralWeights
    folder: Path


@cache
def made(family: str, recipe: str = "s4-g32", backend: str = "cpu", **plan: Any) -> Made:
    """The files of a family's tiny model."""
    folder = Path(_FOLDER.name) / family.replace(" ", "-").replace(",", "")
    if not (folder / "config.json").exists():
        kind, config = ("llama", WIDE_HEADS) if family == ONE_LAYER else FAMILIES[family]
        models.write_model(folder, kind, config)
    weights = models.weights_of(folder, recipe, folder.parent / "store")
    chosen = models.plan_for(weights.model, weights.recipe, backend=backend, **plan)
    chosen = chosen.model_copy(update={"target": "mlx"})
    files = Path(tempfile.mkdtemp(dir=_FOLDER.name))
    export(chosen, weights, files, models.quiet)
    return Made(chosen, files, weights, folder)


@cache
def reference(family: str, recipe: str = "s4-g32") -> Any:
    """transformers' model with the dequantised weights."""
    found = made(family, recipe)
    return models.reference_of(found.folder, found.weights)


def expected(family: str, tokens: list[int], recipe: str = "s4-g32") -> np.ndarray[Any, Any]:
    return models.logits_of(reference(family, recipe), tokens)


def apart(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
    """The largest difference, over the largest value."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def tokens_of(count: int, seed: int = 7) -> list[int]:
    return list(models.tokens_of(count, seed=seed))


def holding(engine: Any, *kv_bits: int) -> Any:
    """The same engine, offering only these widths of keys and values."""
    engine.abilities = engine.abilities.model_copy(update={"kv_bits": kv_bits})
    return engine


def storage(engine: Any, bits: int, capacity: int | None = None) -> Storage:
    return Storage(capacity_tokens=capacity or engine.plan.storage.capacity_tokens, kv_bits=bits)


def fed(engine: Engine, state: State, tokens: list[int], sizes: list[int]) -> np.ndarray[Any, Any]:
    """The logits of every token, fed in pieces whose sizes repeat."""
    found, place, turn = [], 0, 0
    while place < len(tokens):
        piece = tokens[place : place + sizes[turn % len(sizes)]]
        found.append(engine.forward([Chunk(state, piece, len(piece))])[0])
        place, turn = place + len(piece), turn + 1
    return np.concatenate(found)


def fed_under(engine: Engine, state: State, tokens: list[int], policy: CachePolicy, size: int) -> np.ndarray[Any, Any]:
    """As the loop feeds: the oldest block goes before a forward, and chunks are cut at that boundary."""
    found, place = [], 0
    while place < len(tokens):
        gone = policy.eviction(state.length)
        if gone:
            state.evict(*gone)
        room = policy.room(state.length)
        piece = tokens[place : place + min(size, room or size)]
        found.append(engine.forward([Chunk(state, piece, len(piece))])[0])
        place += len(piece)
    return np.concatenate(found)
