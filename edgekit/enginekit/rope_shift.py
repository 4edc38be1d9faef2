"""Shifts the KV cache after an eviction: moves later tokens down and rotates their keys back by as many positions.

Rotary attention depends only on position differences, so the result equals a cache that never had the dropped tokens.
Only the rotary channels of a head are rotated; keys of a layer without rope are only moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.contracts.kv_policy import Eviction
from edgekit.model.rope import frequencies, rotated_pairs
from edgekit.model.spec import ModelSpec

_PIECE_TOKENS = 512


class RopeRotation(NamedTuple):
    """Cosines and sines that rotate keys back, and the partner of each rotary channel in its pair."""

    cosines: NDArray[np.float32]
    sines: NDArray[np.float32]
    partners: NDArray[np.intp]


class Rotation:
    """The rotary embeddings of a model's layers."""

    def __init__(self, model: ModelSpec, context: int) -> None:
        self._frequencies = {
            name: np.asarray(frequencies(rope, context)[0], np.float64) for name, rope in model.ropes.items()
        }
        self._pairs = {name: rotated_pairs(rope) for name, rope in model.ropes.items()}
        self._ropes = [layer.rope for layer in model.layers]

    def back(self, positions: int) -> list[RopeRotation | None]:
        """Return each layer's rotation by `-positions`; None for a layer without rope."""
        rotations = {}
        for name, inverse in self._frequencies.items():
            rotations[name] = rotation_back(positions * inverse, *self._pairs[name])
        return [None if rope is None else rotations[rope] for rope in self._ropes]


def rotation_back(angles: NDArray[np.float64], first: list[int], second: list[int]) -> RopeRotation:
    """Return the rotation by minus `angles` of the channel pairs (`first`, `second`)."""
    cosines, sines = np.empty(2 * len(angles), np.float32), np.empty(2 * len(angles), np.float32)
    partners = np.empty(2 * len(angles), np.intp)
    cosines[first] = cosines[second] = np.cos(angles)
    sines[first], sines[second] = np.sin(angles), -np.sin(angles)
    partners[first], partners[second] = second, first
    return RopeRotation(cosines, sines, partners)


class KeptRun(NamedTuple):
    """Kept tokens `start` to `stop`, which move down to `place`."""

    start: int
    stop: int
    place: int


def runs_between(spans: Sequence[Eviction], length: int) -> Iterator[KeptRun]:
    """Yield the tokens after each dropped span, up to the next one or the end."""
    dropped = 0
    for index, (start, stop) in enumerate(spans):
        dropped += stop - start
        end = spans[index + 1].start if index + 1 < len(spans) else length
        yield KeptRun(stop, end, stop - dropped)


def shift_kv(array: NDArray[Any], start: int, stop: int, length: int, turn: RopeRotation | None) -> None:
    """Drop tokens `start` to `stop` of `length` in [kv_head, token, head_dim]; `turn` is the rotation of keys.

    Tokens are moved in place, 512 at a time, so that the cache is never copied as a whole.
    """
    for head in array:
        for index in range(stop, length, _PIECE_TOKENS):
            moved = head[index : min(length, index + _PIECE_TOKENS)]
            target = head[index - stop + start :][: len(moved)]
            if turn is None:
                target[:] = moved
                continue
            keys = rotate_keys(moved.astype(np.float32), turn)
            # Both channels of a rotated pair have the same scale, so integers can be rotated as they are.
            target[:] = np.rint(keys).clip(-127, 127) if array.dtype == np.int8 else keys


def rotate_keys(keys: NDArray[np.float32], turn: RopeRotation) -> NDArray[np.float32]:
    """Rotate keys [..., head_dim] in place; channels without rope are unchanged."""
    rotary = keys[..., : len(turn.cosines)]
    swapped = rotary[..., turn.partners]
    swapped *= turn.sines
    rotary *= turn.cosines
    rotary += swapped
    return keys
