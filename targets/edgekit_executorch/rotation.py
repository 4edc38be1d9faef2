"""Closes the gap that an eviction leaves in a cache: moves the kept tokens down and turns their keys back.

Rotary attention sees only differences of positions, so afterwards it is as if the dropped tokens had never stood
between the others. A layer without rope only moves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.model import ModelSpec
from edgekit.rope import frequencies


class Turn(NamedTuple):
    """Cosines and sines of turning keys back by some positions; half as many as values turn."""

    cosines: NDArray[np.float32]
    sines: NDArray[np.float32]


class Rotation:
    """The ropes of a model's layers."""

    def __init__(self, model: ModelSpec, context: int) -> None:
        self._inverse = {
            name: np.asarray(frequencies(rope, context)[0], np.float64) for name, rope in model.ropes.items()
        }
        self._ropes = [layer.rope for layer in model.layers]

    def back(self, positions: int) -> list[Turn | None]:
        """For every layer, the turn that closes a gap of `positions`; None where the layer has no rope."""
        turns = {
            name: Turn(np.cos(positions * inverse).astype(np.float32), np.sin(positions * inverse).astype(np.float32))
            for name, inverse in self._inverse.items()
        }
        return [None if rope is None else turns[rope] for rope in self._ropes]


def close_gap(array: NDArray[np.float32], start: int, stop: int, length: int, turn: Turn | None) -> None:
    """Drop tokens `start` to `stop` of `length` in [token, head, dim]; keys come with a `turn`."""
    moved = array[stop:length].copy()
    if turn is not None:
        half = len(turn.cosines)
        first, second = moved[..., :half].copy(), moved[..., half : 2 * half].copy()
        moved[..., :half] = first * turn.cosines + second * turn.sines
        moved[..., half : 2 * half] = second * turn.cosines - first * turn.sines
    array[start : start + length - stop] = moved
