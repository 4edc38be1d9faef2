"""One sequence: what it holds of the keys and values that a program computes, wherever they stand at the moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekit.cache import Storage
from edgekit.holding import Held
from edgekit.interfaces import Segment
from edgekit.segments import KeyValues
from edgekit_executorch.narrow import close, form_of

if TYPE_CHECKING:
    from edgekit_executorch.engine import ExecutorchEngine


class ExecutorchState:
    """Places in the cache are positions: after an eviction the held tokens count from zero again."""

    def __init__(self, engine: ExecutorchEngine, storage: Storage) -> None:
        self.engine, self.storage, self.held = engine, storage, Held(storage)

    @property
    def position(self) -> int:
        return self.held.position

    @property
    def length(self) -> int:
        return self.held.length

    @property
    def bytes(self) -> int:
        return self.engine.state_bytes(self.storage)

    def rewind(self, count: int) -> None:
        self.held.rewind(count)

    def evict(self, start: int, stop: int) -> None:
        self.held.check_evict(start, stop)
        if start == stop:
            return
        arrays = self.engine.seats.arrays(self)
        turns = self.engine.rotation.back(stop - start)
        each = len(arrays) // (2 * len(turns))  # arrays that keys, or values, of a layer consist of
        for layer, turn in enumerate(turns):
            first = 2 * each * layer
            close(arrays[first : first + each], start, stop, self.held.length, turn)
            close(arrays[first + each : first + 2 * each], start, stop, self.held.length, None)
        self.held.evicted(stop - start)

    def save(self, start: int, stop: int) -> KeyValues:
        self.held.check_save(start, stop)
        arrays = [array[:, start:stop].copy() for array in self.engine.seats.arrays(self)]
        return KeyValues(self.engine.model_key, form_of(self.storage.kv_bits), start, arrays)

    def restore(self, segment: Segment) -> None:
        found = self.held.check_restore(segment, self.engine.model_key, form_of(self.storage.kv_bits))
        stop = self.held.length + found.tokens
        for array, saved in zip(self.engine.seats.arrays(self), found.arrays, strict=True):
            array[:, self.held.length : stop] = saved
        self.held.fed(found.tokens, all_layers=True)

    def close(self) -> None:
        if self.held.is_open:
            self.held.is_open = False
            self.engine.leave(self)
