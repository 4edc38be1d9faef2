"""Scores of cached tokens: which are worth keeping in a window. Entry points `edgekit.kv_scorers` add scorers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit.enginekit.keeping.scorer import ATTENTION, CACHE, ByAttention, ByCache, Scorer
from edgekit.errors import UnknownName
from edgekit.plugins import KV_SCORERS, load_added

_LEAST = np.float32(1e-6)  # length below which a vector has no direction


def valuediff(keys: NDArray[np.float32], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Score a token by how far its value vector points away from the mean value, as KeyDiff does with keys.

    KeyDiff: arXiv 2504.15364.
    """
    directions = values / (_lengths(values) + _LEAST)
    mean = directions.mean(axis=0, keepdims=True)
    directions *= mean
    cosines: NDArray[np.float32] = directions.sum(axis=1) / (_lengths(mean)[0] + _LEAST)
    return -cosines


def _lengths(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths: NDArray[np.float32] = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    return lengths


def scorers() -> dict[str, Scorer]:
    """Return every scorer by its name."""
    return {"valuediff": ByCache(valuediff), **load_added(KV_SCORERS)}


def scorers_for(*given: str) -> tuple[str, ...]:
    """Return the names of the scorers that need only the given input: `CACHE` or `ATTENTION`."""
    return tuple(name for name, scorer in scorers().items() if scorer.needs in given)


def find_scorer(name: str) -> Scorer:
    if name not in scorers():
        raise UnknownName("scorer", name, scorers())
    return scorers()[name]


def consensus(scorer: ByCache, layers: Iterable[tuple[NDArray[Any], NDArray[Any]]]) -> NDArray[np.float32]:
    """Return the mean score of each token over all heads of all layers; each head's scores have the same deviation.

    `layers` are keys and values [kv_head, token, head_dim]. Copies are of one head at a time.
    """
    total: NDArray[np.float32] | None = None
    for keys, values in layers:
        for key, value in zip(keys, values, strict=True):
            found = scorer.score(key.astype(np.float32, copy=False), value.astype(np.float32, copy=False))
            found = (found - found.mean()) / np.float32(found.std() + 1e-9)
            total = found if total is None else total + found
    assert total is not None, "the model has no keys and values"
    return np.nan_to_num(total)


def attended(scorer: ByAttention, layers: Iterable[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return the sum over layers of each token's score; `layers` are attention [head, token]."""
    total: NDArray[np.float32] | None = None
    for attention in layers:
        found = scorer.score(attention)
        total = found if total is None else total + found
    assert total is not None, "the model has no attention"
    return np.nan_to_num(total)


__all__ = [
    "ATTENTION", "CACHE", "ByAttention", "ByCache", "attended", "consensus", "find_scorer", "scorers", "scorers_for",
]  # fmt: skip
