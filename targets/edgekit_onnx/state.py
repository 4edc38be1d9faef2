"""One sequence: which row of its slab it lives in, and how many tokens it holds there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edgekit.cache import Storage
from edgekit.errors import InvalidInput, Unsupported, clip
from edgekit.interfaces import Segment
from edgekit.segments import KeyValues
from edgekit_onnx.drafted import Drafted
from edgekit_onnx.rotation import close_gap
from edgekit_onnx.slab import KEY, VALUE, Slab

if TYPE_CHECKING:
    from edgekit_onnx.rows import Rows


class OnnxState:
    """A row of a slab. The engine moves it to another row when a lower one is freed; nobody else notices."""

    def __init__(self, rows: Rows, storage: Storage, row: int) -> None:
        self._rows, self.storage, self.row = rows, storage, row
        self._length = self._position = self._deep = 0
        self.is_open = True
        self.drafted: Drafted | None = None  # behind the end, once they were rewound

    @property
    def position(self) -> int:
        return self._position

    @property
    def length(self) -> int:
        return self._length

    @property
    def deep(self) -> int:
        """Tokens that went through every layer; those after them left at an exit."""
        return self._deep

    @property
    def slab(self) -> Slab:
        return self._rows.slab

    def is_before(self, other: OnnxState) -> bool:
        """Whether `other` lives in the next row of the same slab."""
        return self._rows is other._rows and self.row + 1 == other.row

    @property
    def bytes(self) -> int:
        return self._rows.state_bytes

    @property
    def room(self) -> int:
        return self.storage.capacity_tokens - self._length

    def fed(self, count: int, *, all_layers: bool) -> None:
        """The engine has appended `count` tokens."""
        if all_layers:
            self.drafted = None
        self._length += count
        self._position += count
        if all_layers:
            self._deep = self._length

    def rewind(self, count: int) -> None:
        self._check_open()
        if not 0 <= count <= self._length:
            raise InvalidInput(f"cannot rewind {count} tokens; the state holds {self._length}")
        self._length -= count
        self._position -= count
        self._deep = min(self._deep, self._length)

    def evict(self, start: int, stop: int) -> None:
        self._check_open()
        if not 0 <= start <= stop <= self._length:
            raise InvalidInput(f"cannot evict tokens {start} to {stop}; the state holds {self._length}")
        if stop > self._deep:
            raise InvalidInput("cannot evict while tokens of an early exit are held; rewind them first")
        if start == stop:
            return
        self.drafted = None
        slab, turns = self._rows.slab, self._rows.rotation.back(stop - start)
        for layer, turn in enumerate(turns):
            with slab.edit(layer, KEY, self.row) as keys:
                close_gap(keys, start, stop, self._length, turn)
            with slab.edit(layer, VALUE, self.row) as values:
                close_gap(values, start, stop, self._length, None)
        self._length -= stop - start
        self._deep -= stop - start
        slab.trim(self.row, self._length)

    def save(self, start: int, stop: int) -> KeyValues:
        self._check_open()
        if self._position != self._length:
            raise Unsupported("a state that evicted tokens cannot be saved; save the prefix before the first eviction")
        if not 0 <= start <= stop <= self._deep:
            raise InvalidInput(f"cannot save tokens {start} to {stop}; the state holds {self._deep}")
        slab = self._rows.slab
        arrays = [
            np.array(slab.read(layer, kind, self.row)[:, start:stop])
            for layer in range(len(slab.layers))
            for kind in (KEY, VALUE)
        ]
        return KeyValues(self._rows.model_key, slab.dtype.name, start, arrays)

    def restore(self, segment: Segment) -> None:
        self._check_open()
        if not isinstance(segment, KeyValues) or segment.model != self._rows.model_key:
            raise InvalidInput(f"{clip(segment)} was not saved by this model")
        if segment.start != self._position or self._position != self._length or self._deep != self._length:
            raise InvalidInput(
                f"the segment begins at position {segment.start}; the state stands at {self._position} "
                f"and holds {self._length}"
            )
        if segment.tokens > self.room:
            raise InvalidInput(f"the segment has {segment.tokens} tokens and the state has room for {self.room}")
        slab, stop = self._rows.slab, self._length + segment.tokens
        for index, array in enumerate(segment.arrays):
            with slab.edit(index // 2, index % 2, self.row) as place:
                place[:, self._length : stop] = array
        self.fed(segment.tokens, all_layers=True)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._rows.free(self)

    def _check_open(self) -> None:
        if not self.is_open:
            raise InvalidInput("the state is closed")
