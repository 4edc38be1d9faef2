"""Neutral weights in ONNX Runtime's formats: the same integers and scales, never rounded again.

S4 keeps its bytes (zero point 8), S8 too (zero point 128). Scales take 16 bits where these hold them. What groups with
minima add to such integers is a matrix of floats. Other floats are written in the graph's type of activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.contracts.neutral import MINIMA_WITHIN, NeutralWeights, bits_of
from edgekit.errors import Unsupported
from edgekit_onnx.data_file import DataFile, DataLocation, are_halves
from edgekit_onnx.layout import SLICE_BYTES

_PIECE_BYTES = 16 << 20
_PACKED_BLOCK_BYTES, _ROWS = 12, 128  # slices start where kernels begin a band of rows
_TINY = np.float32(2.0**-24)  # float16 goes no further
_S8_BLOCKS = (128, 64, 32, 16)


class PackedScales(NamedTuple):
    """The scales of a matrix: one for each block of a row, or one for all blocks of a row."""

    place: DataLocation
    numbers: np.dtype[Any]
    columns: int


class PackedMatrix(NamedTuple):
    """A weight of shape [outputs, inputs]. `bits` 0 means floats; `block` inputs share a scale."""

    outputs: int
    inputs: int
    bits: int
    block: int
    values: DataLocation
    scales: PackedScales | None = None
    offsets: PackedScales | None = None  # what is added to each block's integer × scale

    @property
    def blocks(self) -> int:
        return -(-self.inputs // self.block) if self.block else 0

    def slices(self) -> list[PackedMatrix]:
        """Return views of rows, each of at most `SLICE_BYTES` with the scales and sums of packed blocks."""
        row_bytes = self.blocks * (self.block * self.bits // 8 + _PACKED_BLOCK_BYTES) or 4 * self.inputs
        step = max(_ROWS, SLICE_BYTES // row_bytes // _ROWS * _ROWS)
        return [self.rows(start, min(self.outputs, start + step)) for start in range(0, self.outputs, step)]

    def rows(self, start: int, stop: int) -> PackedMatrix:
        """Return a view of some outputs in the same bytes."""

        def cut(place: DataLocation) -> DataLocation:
            each = place.length // self.outputs
            return place.part(start * each, (stop - start) * each)

        scales, offsets = (each and each._replace(place=cut(each.place)) for each in (self.scales, self.offsets))
        return self._replace(outputs=stop - start, values=cut(self.values), scales=scales, offsets=offsets)


def input_blocks(weights: NeutralWeights) -> dict[str, int]:
    """Return the block of each quantised module: as many inputs share a scale of the weights and one of the inputs."""
    inputs = {tensor.module: tensor.shape[-1] for tensor in weights.model.tensors()}
    formats = {module: weights.format_of(module) for module in weights.modules()}
    # Blocks of s8 are no larger than other groups, so that activations are not rounded more coarsely for them.
    limit = min((kind.group for kind in formats.values() if kind.group), default=_S8_BLOCKS[0])

    def block_of(module: str) -> int:
        divisors = [block for block in _S8_BLOCKS if block <= limit and inputs[module] % block == 0]
        return formats[module].group or (divisors[0] if divisors else _S8_BLOCKS[-1])

    return {module: block_of(module) for module, kind in formats.items() if not kind.is_float}


class OnnxPacking:
    """Writes modules of neutral weights into a data file, once each."""

    def __init__(self, weights: NeutralWeights, file: DataFile, numbers: Any) -> None:
        self.weights, self.file, self.numbers = weights, file, np.dtype(numbers)
        self._sizes = {t.module: (t.shape[0], t.shape[1]) for t in weights.model.tensors() if len(t.shape) == 2}
        self._blocks = input_blocks(weights)

    def table(self, module: str) -> PackedMatrix:
        """Write an embedding for look-ups: without padding, and for s8 with one scale for each row."""
        outputs, inputs, bits, _ = self._shape(module)
        row_bytes = inputs * bits // 8 if bits else inputs * self.numbers.itemsize
        values = self.file.add(self._values(module, bits, inputs), outputs * row_bytes)
        if not bits:
            return PackedMatrix(outputs, inputs, 0, 0, values)
        groups = self.weights.scales(module, slice(0, 0)).shape[1]
        block = max(16, 1 << (inputs // groups - 1).bit_length())
        scales = self._scales([[module]], -(-inputs // groups))
        return PackedMatrix(outputs, inputs, bits, block, values, scales, self._offsets([module], block))

    def head_of(self, table: PackedMatrix, module: str) -> PackedMatrix:
        """Return a tied head, which shares the table if products can read its layout."""
        _, inputs, bits, block = self._shape(module)
        if bits and inputs % block:
            return self.matrix(module)
        return table._replace(block=block) if bits else table

    def matrix(self, *modules: str) -> PackedMatrix:
        """Write modules of one format as one stacked matrix."""
        kinds = [self._shape(module) for module in modules]
        (_, inputs, bits, block), outputs = kinds[0], sum(kind[0] for kind in kinds)
        assert all(kind[1:] == kinds[0][1:] for kind in kinds)
        blocks = -(-inputs // block) if block else 0
        each = blocks * block * bits // 8 if bits else inputs * self.numbers.itemsize
        values = self.file.add(
            (piece for module in modules for piece in self._values(module, bits, blocks * block)), outputs * each
        )
        if not bits:
            return PackedMatrix(outputs, inputs, 0, 0, values)
        scales = self._scales([[module] for module in modules], block)
        return PackedMatrix(outputs, inputs, bits, block, values, scales, self._offsets(modules, block))

    def experts(self, *parts: Sequence[Sequence[str]]) -> list[PackedMatrix]:
        """Write each part of all experts as one stacked matrix, with blocks of one size.

        A part lists the modules of every expert. The rows of an expert's modules alternate.
        """
        block = min(self._shape(module)[3] for part in parts for expert in part for module in expert)
        return [self._stacked(part, block) for part in parts]

    def biases(self, experts: Sequence[Sequence[str]]) -> DataLocation:
        """Write the biases of all experts' modules; in one expert they alternate like the rows of `experts`."""
        each = [np.stack([self.weights.floats(f"{module}.bias") for module in expert], axis=1) for expert in experts]
        return self.floats(np.stack(each))

    def _stacked(self, experts: Sequence[Sequence[str]], block: int) -> PackedMatrix:
        _, inputs, bits, _ = self._shape(experts[0][0])
        outputs = sum(self._shape(module)[0] for expert in experts for module in expert)
        each = inputs * bits // 8 if bits else inputs * self.numbers.itemsize
        pieces = (
            piece
            for expert in experts
            for piece in _alternated([self._values(module, bits, inputs) for module in expert])
        )
        values = self.file.add(pieces, outputs * each)
        if not bits:
            return PackedMatrix(outputs, inputs, 0, 0, values)
        return PackedMatrix(outputs, inputs, bits, block, values, self._scales(experts, block))

    def can_join(self, *modules: str) -> bool:
        """Return True if the modules have the same format, so that `matrix` can join them."""
        have_minima = {self.weights.format_of(module).minima for module in modules}
        return len({self._shape(module)[1:] for module in modules}) == len(have_minima) == 1

    def vector(self, name: str, add: float = 0.0) -> DataLocation:
        """Write a norm's weight or a bias, plus `add`."""
        return self.floats(self.weights.floats(name).reshape(-1) + np.float32(add))

    def float_table(self, module: str) -> PackedMatrix:
        """Write a small look-up table, which no recipe quantises."""
        values = self.weights.floats(f"{module}.weight")
        return PackedMatrix(values.shape[0], values.shape[1], 0, 0, self.floats(values))

    def floats(self, values: NDArray[np.float32]) -> DataLocation:
        """Write any floats, e.g. a rotary table."""
        return self.file.add([np.ascontiguousarray(values, self.numbers)], values.size * self.numbers.itemsize)

    def _shape(self, module: str) -> tuple[int, int, int, int]:
        """Return outputs, inputs, bits and block of a module."""
        kind = self.weights.format_of(module)
        outputs, inputs = self._sizes[module]
        if kind.is_float:
            return outputs, inputs, 0, 0
        return outputs, inputs, bits_of(kind), self._blocks[module]

    def _values(self, module: str, bits: int, padded: int) -> Iterator[NDArray[Any]]:
        outputs, inputs = self._sizes[module]
        if not bits:
            for start, stop in _pieces(outputs, inputs * 4):
                yield np.ascontiguousarray(self.weights.floats(f"{module}.weight", slice(start, stop)), self.numbers)
            return
        packed = self.weights.packed(module)
        for start, stop in _pieces(outputs, packed.shape[1]):
            piece = packed[start:stop]
            if bits == 8 and padded != inputs:
                piece = np.pad(piece, ((0, 0), (0, padded - inputs)), constant_values=128)
            yield np.ascontiguousarray(piece)

    def _scales(self, experts: Sequence[Sequence[str]], block: int) -> PackedScales:
        """Write the scales of modules, in 16 bits where these hold them; the rows of an expert's modules alternate."""
        modules = [module for expert in experts for module in expert]
        outputs, inputs = sum(self._sizes[module][0] for module in modules), self._sizes[modules[0]][1]
        by_row = all(self.weights.scales(module, slice(0, 0)).shape[1] == 1 for module in modules)
        columns = 1 if by_row else -(-inputs // block)
        inexact = next((module for module in modules if not are_halves(self.weights.scales(module))), None)
        if inexact and self.numbers == np.float16:
            raise Unsupported(
                f"onnx: {inexact} has scales that 16 bits do not hold; choose the cpu backend, or --recipe s8, which "
                "rounds them again"
            )
        numbers = np.dtype(np.float32 if inexact else np.float16)

        def rows(module: str) -> Iterator[NDArray[Any]]:
            for start, stop in _pieces(self._sizes[module][0], columns * 4):
                scales = self.weights.scales(module, slice(start, stop))
                yield np.repeat(scales, columns // scales.shape[1], axis=1).astype(numbers)

        pieces = (piece for expert in experts for piece in _alternated([rows(module) for module in expert]))
        return PackedScales(self.file.add(pieces, outputs * columns * numbers.itemsize), numbers, columns)

    def _offsets(self, modules: Sequence[str], block: int) -> PackedScales | None:
        """Write what is added to integer × scale in each block, for modules whose groups have minima.

        It takes 16 bits where these are twice as exact as they must be, so that sums of float32 are exact enough.
        """
        if not self.weights.format_of(modules[0]).minima:
            return None
        outputs, columns = sum(self._sizes[module][0] for module in modules), self._sizes[modules[0]][1] // block

        def each() -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
            for module in modules:
                middle = np.float32(1 << (bits_of(self.weights.format_of(module)) - 1))
                for start, stop in _pieces(self._sizes[module][0], columns * 4):
                    some = slice(start, stop)
                    scales, minima = self.weights.scales(module, some), self.weights.minima(module, some)
                    assert minima is not None, "the modules have one format"
                    yield minima + middle * scales, np.abs(scales)

        half = np.float32(MINIMA_WITHIN / 2)
        are_near = all((np.abs(off - off.astype(np.float16)) <= half * scale + _TINY).all() for off, scale in each())
        numbers = np.dtype(np.float16 if are_near else np.float32)
        pieces = (np.repeat(off, columns // off.shape[1], axis=1).astype(numbers) for off, _ in each())
        return PackedScales(self.file.add(pieces, outputs * columns * numbers.itemsize), numbers, columns)


def _alternated(matrices: Sequence[Iterator[NDArray[Any]]]) -> Iterator[NDArray[Any]]:
    """Yield pieces of matrices of one shape whose rows alternate."""
    for pieces in zip(*matrices, strict=True):
        yield np.stack(pieces, axis=1).reshape(-1, pieces[0].shape[-1])


def _pieces(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, _PIECE_BYTES // max(1, row_bytes))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)
