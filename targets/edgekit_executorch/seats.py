"""Whose keys and values stand in the program's one cache, and where those of the others wait.

A program has a single cache. The state that runs sits in it; all others wait in memory of their own. When another is to
run, the two change places layer by layer, so that so many states never take more than as many caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from edgekit_executorch.state import ExecutorchState

Array = NDArray[Any]


class Seats:
    """The program's cache and the memory of those who wait."""

    def __init__(self, cache: Sequence[Array]) -> None:
        self._cache = list(cache)  # [head, slot, width], keys and values by turns
        self._seated: ExecutorchState | None = None
        self._waiting: dict[int, list[Array]] = {}

    def arrays(self, state: ExecutorchState) -> list[Array]:
        """Where a state's keys and values are now, by turns."""
        return self._cache if self._seated is state else self._waiting[id(state)]

    def admit(self, state: ExecutorchState) -> None:
        """Give a new state a place: the cache where nobody sits there."""
        if self._seated is None:
            self._seated = state
            return
        room = state.storage.capacity_tokens
        self._waiting[id(state)] = [_empty(array, room) for array in self._cache]

    def seat(self, state: ExecutorchState) -> None:
        """Bring a state into the cache."""
        other = self._seated
        if other is state:
            return
        mine = self._waiting.pop(id(state))
        self._seated = state
        if other is None:
            for cache, array in zip(self._cache, mine, strict=True):
                cache[:, : state.length] = array[:, : state.length]
            return
        theirs = []
        for cache, array in zip(self._cache, mine, strict=True):
            left = cache[:, : other.length].copy()
            cache[:, : state.length] = array[:, : state.length]
            if array.shape[1] < other.storage.capacity_tokens:
                array = _empty(cache, other.storage.capacity_tokens)
            array[:, : other.length] = left
            theirs.append(array)
        self._waiting[id(other)] = theirs

    def leave(self, state: ExecutorchState) -> None:
        """Give a state's place up."""
        if self._seated is state:
            self._seated = None
        self._waiting.pop(id(state), None)


def _empty(like: Array, tokens: int) -> Array:
    return np.zeros((like.shape[0], tokens, like.shape[2]), like.dtype)
