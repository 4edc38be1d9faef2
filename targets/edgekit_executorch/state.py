"""One sequence: what it holds of the keys and values that a program computes, wherever they stand at the moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekit.cache import Storage
from edgekit.holding import Held
from edgekit.interfaces import Segment
from edgekit.rotation import close_gap
from edgekit.segments import KeyValues

if TYPE_CHECKING:
    from edgekit_executorch.engine import ExecutorchEngine

FORM = "float32"  # how every program holds keys and values


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
        for layer, turn in enumerate(self.engine.rotation.back(stop - start)):
            close_gap(arrays[2 * layer], start, stop, self.held.length, turn)
            close_gap(arrays[2 * layer + 1], start, stop, self.held.length, None)
        self.held.evicted(stop - start)

    def save(self, start: int, stop: int) -> KeyValues:
        self.held.check_save(start, stop)
        arrays = [array[:, start:stop].copy() for array in self.engine.seats.arrays(self)]
        return KeyValues(self.engine.model_key, FORM, start, arrays)

    def restore(self, segment: Segment) -> None:
        found = self.held.check_restore(segment, self.engine.model_key, FORM)
        stop = self.held.length + found.tokens
        for array, saved in zip(self.engine.seats.arrays(self), found.arrays, strict=True):
            array[:, self.held.length : stop] = saved
        self.held.fed(found.tokens, all_layers=True)

    def close(self) -> None:
        if self.held.is_open:
            self.held.is_open = False
            self.engine.leave(self)
