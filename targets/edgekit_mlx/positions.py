"""Rotary positions: tables of cosines and sines for any positions, computed in double precision.

A state whose sinks move forward at each eviction counts positions without end. Angles in double precision keep every
table exact to the last bit of float32, however far it has come. Knows nothing of states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from edgekit.model import ModelSpec
from edgekit.rope import frequencies


class Table(NamedTuple):
    """Cosines and sines [tokens, 1, half of what turns]."""

    cosines: mx.array
    sines: mx.array


class Positions:
    """The ropes of a model, for its planned context."""

    def __init__(self, model: ModelSpec, context: int) -> None:
        self._ropes = {name: frequencies(rope, context) for name, rope in model.ropes.items()}

    def tables(self, positions: NDArray[Any]) -> dict[str, Table]:
        """For queries and keys at these positions, a table of each rope."""
        return {name: self._table(name, positions, factor) for name, (_, factor) in self._ropes.items()}

    def turn(self, name: str, distance: int) -> Table:
        """What moves keys that were turned already by `distance` positions, forward or back."""
        return self._table(name, np.array([distance]), 1.0)

    def _table(self, name: str, positions: NDArray[Any], factor: float) -> Table:
        angles = positions.astype(np.float64)[:, None, None] * np.asarray(self._ropes[name][0], np.float64)
        return Table(*(mx.array((part * factor).astype(np.float32)) for part in (np.cos(angles), np.sin(angles))))


def turned(values: mx.array, table: Table) -> mx.array:
    """Heads [tokens, heads, dim] turned: the first half of what turns against the second; the rest of a head stays."""
    half = table.cosines.shape[-1]
    first, second = (values[..., part].astype(mx.float32) for part in (slice(half), slice(half, 2 * half)))
    parts = (first * table.cosines - second * table.sines, second * table.cosines + first * table.sines)
    found = [part.astype(values.dtype) for part in parts]
    return mx.concatenate([*found, values[..., 2 * half :]] if 2 * half < values.shape[-1] else found, axis=-1)
