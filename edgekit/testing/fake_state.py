"""The state of one request on a fake engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from edgekit.contracts.engine import CachedKV
from edgekit.contracts.kv_policy import Eviction, KVCacheConfig
from edgekit.enginekit.kv_segment import KeyValues
from edgekit.enginekit.state import StateBase
from edgekit.errors import Unsupported

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.enginekit.recurrent import Values
    from edgekit.testing.engine import FakeEngine

WIDTH = 16  # values that a layer keeps of each token


class FakeState(StateBase):
    """The state of one request on a fake engine."""

    def __init__(self, engine: FakeEngine, storage: KVCacheConfig) -> None:
        super().__init__(engine, storage)
        self.engine = engine
        dtype = np.int8 if storage.kv_bits == 8 else np.int16
        self.values = np.zeros((engine.layers, storage.capacity_tokens, WIDTH), dtype)
        self.sums = np.zeros(WIDTH)  # the recurrent part
        if engine.capabilities.checkpoint_tokens is not None:
            self.start_recurrent(engine.capabilities.checkpoint_tokens, [(WIDTH,)])

    @property
    def _can_save_evicted(self) -> bool:
        return self.engine.capabilities.can_save_evicted

    def save(self, start: int, stop: int) -> KeyValues:
        if not self.engine.capabilities.can_save:
            raise Unsupported("this engine cannot save the KV of its states")
        return super().save(start, stop)

    def _evict(self, spans: Sequence[Eviction]) -> None:
        length = self.length
        for start, stop in reversed(spans):
            kept = self.values[:, stop:length].copy()
            self.values[:, start : start + kept.shape[1]] = kept
            length -= stop - start

    def _cached_layers(self, start: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        cached = self.values[:, None, start : self.length]
        return zip(cached, cached, strict=True)

    def _cached(self, layer: int, start: int, stop: int) -> CachedKV:
        values = self.values[layer, None, start:stop].astype(np.float32)
        return CachedKV(values, values)

    def _attention(self, newest: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        return self.engine.attention(self, len(newest))

    def _read(self, start: int, stop: int) -> list[NDArray[Any]]:
        return [layer[None, start:stop].copy() for layer in self.values]

    def _write(self, arrays: Sequence[NDArray[Any]]) -> None:
        for layer, array in zip(self.values, arrays, strict=True):
            layer[self.length : self.length + array.shape[1]] = array[0]

    def _read_recurrent(self) -> Values:
        return (self.sums.astype(np.float32),)

    def _write_recurrent(self, values: Values) -> None:
        self.sums = values[0].astype(np.float64)
