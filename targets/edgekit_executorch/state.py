"""One sequence on ExecuTorch. Its keys and values are in the program's cache while it is active."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from edgekit.contracts.kv_policy import Eviction, KVCacheConfig
from edgekit.enginekit.rope_shift import Rotation, runs_between
from edgekit.enginekit.state import StateBase, StateOwner
from edgekit_executorch.int8_kv import close_gap
from edgekit_executorch.kv_swap import KVCacheSwap


class ExecutorchState(StateBase):
    """A state whose slots are positions: after an eviction, the remaining tokens count from zero again."""

    saves_evicted = True

    def __init__(self, owner: StateOwner, storage: KVCacheConfig, swap: KVCacheSwap, rotation: Rotation) -> None:
        super().__init__(owner, storage)
        self._swap, self._rotation = swap, rotation
        swap.admit(self)

    def _evict(self, spans: Sequence[Eviction]) -> None:
        arrays = self._swap.arrays(self)
        for start, stop, place in runs_between(spans, self.length):
            rotations = self._rotation.back(start - place)
            count = len(arrays) // (2 * len(rotations))  # number of arrays of a layer's keys, and of its values
            for layer, rotation in enumerate(rotations):
                first = 2 * count * layer
                close_gap(arrays[first : first + count], place, start, stop, rotation)
                close_gap(arrays[first + count : first + 2 * count], place, start, stop, None)

    def _cached_layers(self, start: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        arrays = [array[:, start : self.length] for array in self._swap.arrays(self)]
        yield from zip(arrays[::2], arrays[1::2], strict=True)  # a cache of floats has one array of keys, one of values

    def _read(self, start: int, stop: int) -> list[NDArray[Any]]:
        return [array[:, start:stop].copy() for array in self._swap.arrays(self)]

    def _write(self, arrays: Sequence[NDArray[Any]]) -> None:
        for array, saved in zip(self._swap.arrays(self), arrays, strict=True):
            array[:, self.length : self.length + saved.shape[1]] = saved
