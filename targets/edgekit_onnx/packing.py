"""Neutral weights as ONNX Runtime wants them: the same integers, the same scales, never rounded again.

S4 keeps its bytes (zero point 8). S8 keeps its bytes (zero point 128) and repeats its scale for every block. Floats are
written in the numbers that the graph computes with. Knows nothing of graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.weights.neutral import NeutralWeights
from edgekit_onnx.data_file import DataFile, Place

_PIECE_BYTES = 16 << 20
_S8_BLOCKS = (128, 64, 32, 16)


class Matrix(NamedTuple):
    """A weight of shape [outputs, inputs]. `bits` 0 means floats; `block` inputs share a scale."""

    outputs: int
    inputs: int
    bits: int
    block: int
    values: Place
    scales: Place | None = None

    @property
    def blocks(self) -> int:
        return -(-self.inputs // self.block) if self.block else 0

    def rows(self, start: int, stop: int) -> Matrix:
        """Some of the outputs; no byte moves."""

        def cut(place: Place) -> Place:
            each = place.length // self.outputs
            return place.part(start * each, (stop - start) * each)

        return self._replace(
            outputs=stop - start, values=cut(self.values), scales=None if self.scales is None else cut(self.scales)
        )


class Packing:
    """Writes modules of neutral weights into a data file, once each."""

    def __init__(self, weights: NeutralWeights, file: DataFile, numbers: Any) -> None:
        self.weights, self.file, self.numbers = weights, file, np.dtype(numbers)
        self._sizes = {t.module: (t.shape[0], t.shape[1]) for t in weights.model.tensors() if len(t.shape) == 2}
        groups = [weights.format_of(module).group for module in weights.modules()]
        # With blocks no larger than the linears' groups, the head rounds as the linears do and no worse.
        self._s8_limit = min((group for group in groups if group), default=_S8_BLOCKS[0])

    def table(self, module: str) -> Matrix:
        """An embedding, to look rows up in: its bytes without padding, and for s8 one scale a row."""
        outputs, inputs, bits, _ = self._shape(module)
        row_bytes = inputs * bits // 8 if bits else inputs * self.numbers.itemsize
        values = self.file.add(self._values(module, bits, inputs), outputs * row_bytes)
        if not bits:
            return Matrix(outputs, inputs, 0, 0, values)
        scales = self.weights.scales(module)
        block = max(16, 1 << (inputs // scales.shape[1] - 1).bit_length())
        return Matrix(outputs, inputs, bits, block, values, self.floats(scales))

    def head_of(self, table: Matrix, module: str) -> Matrix:
        """A tied head: the bytes of the table where they are laid out alike, with the scales of a product's blocks."""
        _, inputs, bits, block = self._shape(module)
        if bits and inputs % block:
            return self.matrix(module)
        return table if not bits else table._replace(block=block, scales=self._block_scales(module))

    def matrix(self, *modules: str) -> Matrix:
        """These modules below one another, as one matrix; they must share a format."""
        kinds = [self._shape(module) for module in modules]
        (_, inputs, bits, block), outputs = kinds[0], sum(kind[0] for kind in kinds)
        assert all(kind[1:] == kinds[0][1:] for kind in kinds)
        blocks = -(-inputs // block) if block else 0
        each = blocks * block * bits // 8 if bits else inputs * self.numbers.itemsize
        values = self.file.add(
            (piece for module in modules for piece in self._values(module, bits, blocks * block)), outputs * each
        )
        if not bits:
            return Matrix(outputs, inputs, 0, 0, values)
        return Matrix(outputs, inputs, bits, block, values, self._block_scales(*modules))

    def can_join(self, *modules: str) -> bool:
        """Whether the modules can be one matrix."""
        return len({self._shape(module)[1:] for module in modules}) == 1

    def vector(self, name: str, add: float = 0.0) -> Place:
        """A norm's weight or a bias, with `add` added."""
        return self.floats(self.weights.floats(name).reshape(-1) + np.float32(add))

    def floats(self, values: NDArray[np.float32]) -> Place:
        """Any floats, e.g. a table."""
        return self.file.add([np.ascontiguousarray(values, self.numbers)], values.size * self.numbers.itemsize)

    def joined_vectors(self, names: Sequence[str]) -> Place:
        return self.floats(np.concatenate([self.weights.floats(name).reshape(-1) for name in names]))

    def _shape(self, module: str) -> tuple[int, int, int, int]:
        """Outputs, inputs, bits and block of a module."""
        kind = self.weights.format_of(module)
        outputs, inputs = self._sizes[module]
        if kind.is_float:
            return outputs, inputs, 0, 0
        if kind.kind == "s4":
            assert kind.group is not None
            return outputs, inputs, 4, kind.group
        divisors = [block for block in _S8_BLOCKS if block <= self._s8_limit and inputs % block == 0]
        return outputs, inputs, 8, divisors[0] if divisors else _S8_BLOCKS[-1]

    def _values(self, module: str, bits: int, padded: int) -> Iterator[NDArray[Any]]:
        outputs, inputs = self._sizes[module]
        if not bits:
            for start, stop in _pieces(outputs, inputs * 4):
                yield self._exact(self.weights.floats(f"{module}.weight", slice(start, stop)))
            return
        packed = self.weights.packed(module)
        for start, stop in _pieces(outputs, packed.shape[1]):
            piece = packed[start:stop]
            if bits == 8 and padded != inputs:
                piece = np.pad(piece, ((0, 0), (0, padded - inputs)), constant_values=128)
            yield np.ascontiguousarray(piece)

    def _block_scales(self, *modules: str) -> Place:
        """One scale for every block of a product."""
        _, inputs, _, block = self._shape(modules[0])
        blocks, outputs = -(-inputs // block), sum(self._shape(module)[0] for module in modules)
        pieces = (piece for module in modules for piece in self._scales(module, blocks))
        return self.file.add(pieces, outputs * blocks * self.numbers.itemsize)

    def _scales(self, module: str, blocks: int) -> Iterator[NDArray[Any]]:
        scales = self.weights.scales(module)
        for start, stop in _pieces(scales.shape[0], blocks * 4):
            yield self._exact(np.broadcast_to(scales[start:stop], (stop - start, blocks)))

    def _exact(self, values: NDArray[np.float32]) -> NDArray[Any]:
        return np.ascontiguousarray(values, self.numbers)


def _pieces(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, _PIECE_BYTES // max(1, row_bytes))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)
