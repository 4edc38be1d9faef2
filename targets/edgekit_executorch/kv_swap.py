"""Swaps the keys and values of states in and out of a program's one cache.

The cache holds them for the active state; every other state keeps them in its own memory. Activating another
state swaps the two array by array, so that n states never take more memory than n caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekit.contracts.kv_policy import KVCacheConfig

Array = NDArray[Any]


class Swappable(Protocol):
    """The parts of a state that swapping needs."""

    storage: KVCacheConfig

    @property
    def length(self) -> int: ...


class KVCacheSwap:
    """The program's cache, and the memory of inactive states."""

    def __init__(self, cache: Sequence[Array]) -> None:
        self._cache = list(cache)  # [head, slot, width], alternating between keys and values
        self._active: Swappable | None = None
        self._waiting: dict[int, list[Array]] = {}  # by the state's id()

    def arrays(self, state: Swappable) -> list[Array]:
        """Return the arrays that now hold a state's keys and values."""
        return self._cache if self._active is state else self._waiting[id(state)]

    def admit(self, state: Swappable) -> None:
        """Assign memory to a new state: the cache if it is free."""
        if self._active is None:
            self._active = state
        else:
            self._waiting[id(state)] = [_empty(array, state.storage.capacity_tokens) for array in self._cache]

    def activate(self, state: Swappable) -> None:
        """Move a state into the cache, and the active state out of it."""
        other = self._active
        if other is state:
            return
        mine = self._waiting.pop(id(state))
        self._active = state
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

    def remove(self, state: Swappable) -> None:
        """Free a state's memory."""
        if self._active is state:
            self._active = None
        self._waiting.pop(id(state), None)


def _empty(like: Array, tokens: int) -> Array:
    return np.zeros((like.shape[0], tokens, like.shape[2]), like.dtype)
