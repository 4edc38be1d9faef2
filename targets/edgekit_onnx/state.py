"""One sequence: which row of its slab it lives in, and how many tokens it holds there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edgekit.cache import Storage
from edgekit.holding import Held
from edgekit.interfaces import Segment
from edgekit.rotation import close_gap
from edgekit.segments import KeyValues
from edgekit_onnx.drafted import Drafted
from edgekit_onnx.slab import KEY, VALUE, Slab

if TYPE_CHECKING:
    from edgekit_onnx.bodies import Running
    from edgekit_onnx.rows import Rows


class OnnxState:
    """A row of a slab. The engine moves it to another row when a lower one is freed; nobody else notices."""

    def __init__(self, rows: Rows, storage: Storage, row: int) -> None:
        self._rows, self.storage, self.row = rows, storage, row
        self.held = Held(storage)
        self.drafted: Drafted | None = None  # behind the end, once they were rewound

    @property
    def position(self) -> int:
        return self.held.position

    @property
    def length(self) -> int:
        return self.held.length

    @property
    def deep(self) -> int:
        """Tokens that went through every layer; those after them left at an exit."""
        return self.held.deep

    @property
    def slab(self) -> Slab:
        return self._rows.slab

    @property
    def running(self) -> Running:
        """What runs it."""
        return self._rows.running

    def is_before(self, other: OnnxState) -> bool:
        """Whether `other` lives in the next row of the same slab."""
        return self._rows is other._rows and self.row + 1 == other.row

    @property
    def bytes(self) -> int:
        return self._rows.state_bytes

    def fed(self, count: int, *, all_layers: bool) -> None:
        """The engine has appended `count` tokens."""
        if all_layers:
            self.drafted = None
        self.held.fed(count, all_layers=all_layers)

    def rewind(self, count: int) -> None:
        self.held.rewind(count)

    def evict(self, start: int, stop: int) -> None:
        self.held.check_evict(start, stop)
        if start == stop:
            return
        self.drafted = None
        slab, turns = self._rows.slab, self._rows.rotation.back(stop - start)
        for layer, turn in enumerate(turns):
            with slab.edit(layer, KEY, self.row) as keys:
                close_gap(keys, start, stop, self.held.length, turn)
            with slab.edit(layer, VALUE, self.row) as values:
                close_gap(values, start, stop, self.held.length, None)
        self.held.evicted(stop - start)
        slab.trim(self.row, self.held.length)

    def save(self, start: int, stop: int) -> KeyValues:
        self.held.check_save(start, stop)
        slab = self._rows.slab
        arrays = [
            np.array(slab.read(layer, kind, self.row)[:, start:stop])
            for layer in range(len(slab.layers))
            for kind in (KEY, VALUE)
        ]
        return KeyValues(self._rows.model_key, slab.dtype.name, start, arrays)

    def restore(self, segment: Segment) -> None:
        slab = self._rows.slab
        segment = self.held.check_restore(segment, self._rows.model_key, slab.dtype.name)
        stop = self.length + segment.tokens
        for index, array in enumerate(segment.arrays):
            with slab.edit(index // 2, index % 2, self.row) as place:
                place[:, self.held.length : stop] = array
        self.fed(segment.tokens, all_layers=True)

    def close(self) -> None:
        if self.held.is_open:
            self.held.is_open = False
            self._rows.free(self)
