"""Keys, values and recurrent parts of all states with the same configuration, in one mapping without huge pages.

Pages without tokens take no memory, and pages that an eviction empties are returned to the system. numpy would request
huge pages, in which 64 tokens take as much as thousands.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekit.common.system import release_pages
from edgekit_onnx.pages import anonymous

KEY, VALUE = 0, 1


class LayerShape(NamedTuple):
    """The shape of one token's keys, and of its values, in one layer; a recurrent layer has no heads."""

    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.kv_heads * self.head_dim


class KVArena(Protocol):
    """Memory for `slots` states of `capacity` tokens. A layer's keys and values: [slot, kv_head, capacity, head_dim].

    `kind` is KEY or VALUE.
    """

    capacity: int
    slots: int
    layers: tuple[LayerShape, ...]
    dtype: np.dtype[Any]
    recurrent: tuple[NDArray[np.float32], ...]  # in the order of `recurrent_arrays`: [slot, *shape]

    def address(self, layer: int, kind: int, slot: int) -> int:
        """Return the address of a slot's first number, for a binding."""

    def read(self, layer: int, kind: int, slot: int) -> NDArray[Any]:
        """Return a view [kv_head, capacity, head_dim], valid until the next call."""

    def edit(self, layer: int, kind: int, slot: int) -> AbstractContextManager[NDArray[Any]]:
        """Return a context manager that yields the same array for writing."""

    def trim(self, slot: int, length: int) -> None:
        """Return the memory of tokens from `length` on to the system if possible; they are never read again."""

    def close(self) -> None: ...


class MappedKVArena:
    """An arena in host memory."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        slots: int,
        capacity: int,
        dtype: Any,
        recurrent: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self.layers, self.slots, self.capacity, self.dtype = tuple(layers), slots, capacity, np.dtype(dtype)
        self.recurrent = tuple(np.zeros((slots, *shape), np.float32) for shape in recurrent)
        self._memory = anonymous(sum(2 * layer.width for layer in layers) * capacity * self.dtype.itemsize * slots)
        flat = np.frombuffer(self._memory, np.uint8)
        self._base = int(flat.ctypes.data)
        self._views: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self._offsets: list[tuple[int, int]] = []
        offset = 0
        for layer in self.layers:
            size = slots * layer.width * capacity * self.dtype.itemsize
            shape = (slots, layer.kv_heads, capacity, layer.head_dim)
            key, value = (flat[at : at + size].view(self.dtype).reshape(shape) for at in (offset, offset + size))
            self._views.append((key, value))
            self._offsets.append((offset, offset + size))
            offset += 2 * size

    def address(self, layer: int, kind: int, slot: int) -> int:
        slot_bytes = self.layers[layer].width * self.capacity * self.dtype.itemsize
        address: int = self._base + self._offsets[layer][kind] + slot * slot_bytes
        return address

    def read(self, layer: int, kind: int, slot: int) -> NDArray[Any]:
        array: NDArray[Any] = self._views[layer][kind][slot]
        return array

    @contextmanager
    def edit(self, layer: int, kind: int, slot: int) -> Iterator[NDArray[Any]]:
        yield self._views[layer][kind][slot]

    def trim(self, slot: int, length: int) -> None:
        for index, layer in enumerate(self.layers):
            token_bytes = layer.head_dim * self.dtype.itemsize
            for kind in (KEY, VALUE):
                start = self._offsets[index][kind] + slot * layer.width * self.capacity * self.dtype.itemsize
                if length == 0:
                    self._give_back(start, start + layer.kv_heads * self.capacity * token_bytes)
                    continue
                for head in range(layer.kv_heads):
                    first = start + head * self.capacity * token_bytes
                    self._give_back(first + length * token_bytes, first + self.capacity * token_bytes)

    def close(self) -> None:
        self._views, self.recurrent = [], ()
        self._give_back(0, len(self._memory))

    def _give_back(self, start: int, stop: int) -> None:
        """Return whole pages to the system; the next read finds zeros there."""
        page = mmap.PAGESIZE
        start, stop = -(-start // page) * page, stop // page * page
        release_pages(self._memory, start, stop)
