"""The keys and values of every state with the same storage, in one anonymous mapping without huge pages.

A page that no token was written to costs nothing, and what an eviction empties goes back to the system. numpy would ask
for huge pages: 64 tokens then cost as much as thousands. Knows nothing of tokens or of what attention does with them.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekit_onnx.pages import anonymous

KEY, VALUE = 0, 1


class LayerShape(NamedTuple):
    """What one layer keeps of a token, for keys and for values."""

    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.kv_heads * self.head_dim


class Slab(Protocol):
    """`rows` states of `capacity` tokens; a layer holds its keys and values as [row, kv_head, capacity, head_dim]."""

    capacity: int
    rows: int
    layers: tuple[LayerShape, ...]
    dtype: np.dtype[Any]

    def address(self, layer: int, kind: int, row: int) -> int:
        """Where that row begins, for a binding."""

    def read(self, layer: int, kind: int, row: int) -> NDArray[Any]:
        """[kv_head, capacity, head_dim], to be read before anything else is done."""

    def edit(self, layer: int, kind: int, row: int) -> Any:
        """A context in which the same array may be written to."""

    def trim(self, row: int, length: int) -> None:
        """Tokens from `length` on are never read again: give their memory back where that is possible."""

    def close(self) -> None: ...


def row_bytes(layers: Sequence[LayerShape], capacity: int, item_bytes: int) -> int:
    """What one state takes when it is full."""
    return sum(2 * layer.width for layer in layers) * capacity * item_bytes


class MappedSlab:
    """In the memory of this machine."""

    def __init__(self, layers: Sequence[LayerShape], rows: int, capacity: int, dtype: Any) -> None:
        self.layers, self.rows, self.capacity, self.dtype = tuple(layers), rows, capacity, np.dtype(dtype)
        self._memory = anonymous(row_bytes(layers, capacity, self.dtype.itemsize) * rows)
        flat = np.frombuffer(self._memory, np.uint8)
        self._base = int(flat.ctypes.data)
        self._views: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self._offsets: list[tuple[int, int]] = []
        offset = 0
        for layer in self.layers:
            size = rows * layer.width * capacity * self.dtype.itemsize
            shape = (rows, layer.kv_heads, capacity, layer.head_dim)
            key, value = (flat[at : at + size].view(self.dtype).reshape(shape) for at in (offset, offset + size))
            self._views.append((key, value))
            self._offsets.append((offset, offset + size))
            offset += 2 * size

    def address(self, layer: int, kind: int, row: int) -> int:
        each = self.layers[layer].width * self.capacity * self.dtype.itemsize
        place: int = self._base + self._offsets[layer][kind] + row * each
        return place

    def read(self, layer: int, kind: int, row: int) -> NDArray[Any]:
        array: NDArray[Any] = self._views[layer][kind][row]
        return array

    @contextmanager
    def edit(self, layer: int, kind: int, row: int) -> Iterator[NDArray[Any]]:
        yield self._views[layer][kind][row]

    def trim(self, row: int, length: int) -> None:
        for index, layer in enumerate(self.layers):
            token = layer.head_dim * self.dtype.itemsize
            for kind in (KEY, VALUE):
                start = self._offsets[index][kind] + row * layer.width * self.capacity * self.dtype.itemsize
                for head in range(layer.kv_heads):
                    first = start + head * self.capacity * token
                    self._give_back(first + length * token, first + self.capacity * token)

    def close(self) -> None:
        self._views = []
        self._give_back(0, len(self._memory))

    def _give_back(self, start: int, stop: int) -> None:
        """Return whole pages; the next read finds zeros there."""
        page = mmap.PAGESIZE
        start, stop = -(-start // page) * page, stop // page * page
        if stop > start and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, start, stop - start)
