"""Closes the gap that an eviction leaves: moves the kept tokens down and turns their keys back by as many positions.

Rotary attention sees only differences of positions, so afterwards the state is as if the dropped tokens had never stood
between the others. Only the part of a head that its rope turns is turned; a layer without rope only moves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.model import ModelSpec
from edgekit.rope import frequencies

_PIECE_TOKENS = 512


class Turn(NamedTuple):
    """Cosines and sines of turning keys back by some positions, doubled for both halves of what turns."""

    cosines: NDArray[np.float32]
    sines: NDArray[np.float32]


class Rotation:
    """The ropes of a model's layers."""

    def __init__(self, model: ModelSpec, context: int) -> None:
        self._frequencies = {
            name: np.asarray(frequencies(rope, context)[0], np.float64) for name, rope in model.ropes.items()
        }
        self._ropes = [layer.rope for layer in model.layers]

    def back(self, positions: int) -> list[Turn | None]:
        """For every layer, the turn that closes a gap of `positions`; None where the layer has no rope."""
        turns = {}
        for name, inverse in self._frequencies.items():
            angles = positions * inverse
            cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
            turns[name] = Turn(np.concatenate([cosines, cosines]), np.concatenate([sines, -sines]))
        return [None if rope is None else turns[rope] for rope in self._ropes]


def close_gap(array: NDArray[Any], start: int, stop: int, length: int, turn: Turn | None) -> None:
    """Drop tokens `start` to `stop` of `length` in [kv_head, token, head_dim]; keys come with a `turn`.

    In pieces, each of which lands before the next one begins: what is moved is never held a second time.
    """
    for head in array:
        for place in range(stop, length, _PIECE_TOKENS):
            moved = head[place : min(length, place + _PIECE_TOKENS)]
            target = head[place - stop + start :][: len(moved)]
            if turn is None:
                target[:] = moved
                continue
            keys = turned(moved.astype(np.float32), turn)
            # Both channels that are turned into each other have the same step, so whole numbers turn as they are.
            target[:] = np.rint(keys).clip(-127, 127) if array.dtype == np.int8 else keys


def turned(keys: NDArray[np.float32], turn: Turn) -> NDArray[np.float32]:
    """Keys [..., head_dim], in their own memory, turned back; what the rope leaves alone stays."""
    half = len(turn.cosines) // 2
    turning = keys[..., : 2 * half]
    swapped = np.concatenate([turning[..., half:], turning[..., :half]], axis=-1)
    swapped *= turn.sines
    turning *= turn.cosines
    turning += swapped
    return keys
