"""Rotary position tables: cosines and sines for any positions, computed in double precision.

The positions of a state that evicts grow without bound. Angles in double precision keep every table exact in float32,
however large the position.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from edgekit.model.rope import frequencies
from edgekit.model.spec import ModelSpec


class RopeTable(NamedTuple):
    """Cosines and sines [tokens, 1, half of the rotated channels]."""

    cosines: mx.array
    sines: mx.array
    interleaved: bool


class RopeTables:
    """The ropes of a model, for its planned context."""

    def __init__(self, model: ModelSpec, context: int) -> None:
        self._ropes = {name: frequencies(rope, context) for name, rope in model.ropes.items()}
        self._interleaved = {name for name, rope in model.ropes.items() if rope.interleaved}

    def tables(self, positions: NDArray[Any]) -> dict[str, RopeTable]:
        """Return the table of each rope for queries and keys at these positions."""
        return {name: self._table(name, positions, factor) for name, (_, factor) in self._ropes.items()}

    def rotation(self, name: str, distance: int) -> RopeTable:
        """Return the table that moves rotated keys by `distance` positions, forward or back."""
        return self._table(name, np.array([distance]), 1.0)

    def _table(self, name: str, positions: NDArray[Any], factor: float) -> RopeTable:
        angles = positions.astype(np.float64)[:, None, None] * np.asarray(self._ropes[name][0], np.float64)
        cosines, sines = (mx.array((part * factor).astype(np.float32)) for part in (np.cos(angles), np.sin(angles)))
        return RopeTable(cosines, sines, name in self._interleaved)


def rotate_keys(values: mx.array, table: RopeTable) -> mx.array:
    """Rotate queries or keys [tokens, heads, dim]; channels beyond the table's width are unchanged."""
    half = table.cosines.shape[-1]
    pairs = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if table.interleaved else (slice(half), slice(half, 2 * half))
    )
    first, second = (values[..., part].astype(mx.float32) for part in pairs)
    rotated = (first * table.cosines - second * table.sines, second * table.cosines + first * table.sines)
    parts = [part.astype(values.dtype) for part in rotated]
    if table.interleaved:
        parts = [mx.stack(parts, axis=-1).flatten(-2)]
    return mx.concatenate([*parts, values[..., 2 * half :]] if 2 * half < values.shape[-1] else parts, axis=-1)
