"""One sequence: how many tokens it holds, and what may be done to them between two calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekit.cache import Storage
from edgekit.errors import InvalidInput, Unsupported, clip
from edgekit.interfaces import Segment
from edgekit_executorch.rotation import close_gap
from edgekit_executorch.segment import ExecutorchSegment

if TYPE_CHECKING:
    from edgekit_executorch.engine import ExecutorchEngine


class ExecutorchState:
    """Places in the cache are positions: after an eviction the held tokens count from zero again."""

    def __init__(self, engine: ExecutorchEngine, storage: Storage) -> None:
        self.engine, self.storage = engine, storage
        self._position = self._length = 0
        self.is_open = True

    @property
    def position(self) -> int:
        return self._position

    @property
    def length(self) -> int:
        return self._length

    @property
    def bytes(self) -> int:
        return self.engine.state_bytes(self.storage)

    @property
    def room(self) -> int:
        return self.storage.capacity_tokens - self._length

    def fed(self, count: int) -> None:
        """The engine has appended `count` tokens."""
        self._length += count
        self._position += count

    def rewind(self, count: int) -> None:
        self._check_open()
        if not 0 <= count <= self._length:
            raise InvalidInput(f"cannot rewind {count} tokens; the state holds {self._length}")
        self._length -= count
        self._position -= count

    def evict(self, start: int, stop: int) -> None:
        self._check_open()
        if not 0 <= start <= stop <= self._length:
            raise InvalidInput(f"cannot evict tokens {start} to {stop}; the state holds {self._length}")
        if start == stop:
            return
        arrays = self.engine.seats.arrays(self)
        for layer, turn in enumerate(self.engine.rotation.back(stop - start)):
            close_gap(arrays[2 * layer], start, stop, self._length, turn)
            close_gap(arrays[2 * layer + 1], start, stop, self._length, None)
        self._length -= stop - start

    def save(self, start: int, stop: int) -> ExecutorchSegment:
        self._check_open()
        if self._position != self._length:
            raise Unsupported("a state that evicted tokens cannot be saved; save the prefix before the first eviction")
        if not 0 <= start <= stop <= self._length:
            raise InvalidInput(f"cannot save tokens {start} to {stop}; the state holds {self._length}")
        arrays = [array[start:stop].copy() for array in self.engine.seats.arrays(self)]
        return ExecutorchSegment(start, stop - start, arrays, self.engine.model_key)

    def restore(self, segment: Segment) -> None:
        self._check_open()
        if not isinstance(segment, ExecutorchSegment) or segment.model_key != self.engine.model_key:
            raise InvalidInput(f"{clip(segment)} was not saved by this model")
        if segment.start != self._position or self._position != self._length:
            raise InvalidInput(
                f"the segment begins at position {segment.start}; the state stands at {self._position} "
                f"and holds {self._length}"
            )
        if segment.tokens > self.room:
            raise InvalidInput(f"the segment has {segment.tokens} tokens and the state has room for {self.room}")
        for array, saved in zip(self.engine.seats.arrays(self), segment.arrays, strict=True):
            array[self._length : self._length + segment.tokens] = saved
        self.fed(segment.tokens)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.engine.leave(self)

    def _check_open(self) -> None:
        if not self.is_open:
            raise InvalidInput("the state is closed")
