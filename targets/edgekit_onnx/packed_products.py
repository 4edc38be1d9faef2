"""Writes graphs whose products hold their weights in the order in which edgekit's kernels read them.

They are made once, from the audited graphs, and kept in the cache of packed weights, from which sessions and processes
map the same pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit.common.files import write_file
from edgekit_onnx.audit import CheckedGraph
from edgekit_onnx.data_file import DATA_FILE, DataFile, DataLocation, are_halves
from edgekit_onnx.float16_kv import BITS as HALF_BITS, halves_of, with_floats, with_halves
from edgekit_onnx.layout import with_nodes
from edgekit_onnx.product_kernels import OFFSETS_INPUT, PRODUCT, with_gates, with_kernels

_BAND = 32  # outputs that kernels compute together
_PIECE_BYTES = 4 << 20
_NUMBERS = {1: np.float32, 10: np.float16}  # by onnx.TensorProto's numbers of types


def pack_products(files: Path, kv_bits: int, graphs: Sequence[CheckedGraph], folder: Path, *, gated: bool) -> None:
    """Write each graph into `folder`, and the weights of all into one data file there.

    For an artifact with a cache of 16 bits, two graphs are written: one for a cache of 32 bits, one for 16.
    """
    with DataFile(folder) as target:
        weights = _Weights(np.memmap(files / DATA_FILE, np.uint8, "r"), target)
        for graph in graphs:
            data = weights.moved(with_kernels(with_floats(graph.data) if kv_bits == HALF_BITS else graph.data))
            data = with_gates(data) if gated else data
            write_file(folder / f"{graph.name}.onnx", data)
            if kv_bits == HALF_BITS:
                write_file(folder / halves_of(graph.name), with_halves(data))


def packed_values(stored: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return values [outputs, blocks, bytes] as [bands of outputs, bytes]: 4 inputs of each output, then the next 4.

    Of 4-bit values, the next 4 inputs are in the high halves of the same bytes.
    """
    banded = _in_bands(stored.reshape(len(stored), -1))
    if bits == 4:
        pairs = banded.reshape(*banded.shape[:2], -1, 4)
        eight = np.stack([pairs & 15, pairs >> 4], -1).reshape(*pairs.shape[:3], 8)
        banded = eight[..., :4] | eight[..., 4:] << 4
    steps = banded.reshape(*banded.shape[:2], -1, 4)
    return np.ascontiguousarray(steps.transpose(0, 2, 1, 3)).reshape(len(steps), -1)


def packed_scales(stored: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return scales [outputs, blocks] as [bands of outputs, blocks, outputs of a band]."""
    return np.ascontiguousarray(_in_bands(stored).transpose(0, 2, 1))


def _in_bands(rows: NDArray[Any]) -> NDArray[Any]:
    """Return rows as [bands, rows of a band, columns]; zeros fill the last band."""
    padded = np.pad(rows, ((0, -len(rows) % _BAND), (0, 0)))
    return padded.reshape(-1, _BAND, rows.shape[1])


def _scales_of(graph: Any, stored: Mapping[str, Any]) -> dict[str, tuple[Any, int]]:
    """Return values that are computed from stored scales, with these and the number of blocks."""
    sizes = {tensor.name: tensor.raw_data for tensor in graph.initializer}
    found: dict[str, tuple[Any, int]] = {}
    for node in graph.node:
        source = found.get(node.input[0]) or (stored.get(node.input[0]), 0)
        if node.op_type in ("Cast", "Expand") and source[0] is not None:
            expanded = node.op_type == "Expand" and int(np.frombuffer(sizes[node.input[1]], np.int64)[-1])
            found[node.output[0]] = (source[0], expanded or source[0].dims[-1])
    return found


def _of_blocks(scales: NDArray[Any], columns: int, blocks: int) -> NDArray[Any]:
    """Return scales [rows, blocks]; one of each row is repeated."""
    return np.repeat(scales.reshape(-1, columns), blocks // columns, axis=1)


def _copy(tensor: Any, name: str) -> Any:
    copied = type(tensor).FromString(tensor.SerializeToString())
    copied.name = name
    return copied


class _Weights:
    """The data file of an artifact, and the one of packed graphs, where each piece is written once."""

    def __init__(self, source: NDArray[np.uint8], target: DataFile) -> None:
        self._source, self._target = source, target
        self._written: dict[str, DataLocation] = {}

    def moved(self, data: bytes) -> bytes:
        """Return the graph with its weights in the new data file; products have them in the order of the kernels."""
        import onnx
        from onnx import helper

        model = onnx.ModelProto.FromString(data)
        graph, added = model.graph, []
        stored = {tensor.name: tensor for tensor in graph.initializer if tensor.external_data}
        scales = _scales_of(graph, stored)
        nodes = [node for node in graph.node if node.output[0] not in scales]
        for node in nodes:
            if node.op_type == PRODUCT and node.input[1] in stored and node.input[2] in {*scales, *stored}:
                bits = next(attribute.i for attribute in node.attribute if attribute.name == "bits")
                node.attribute.append(helper.make_attribute("packed", 1))
                values, blocks = stored[node.input[1]], stored[node.input[1]].dims[1]
                found, _ = scales.get(node.input[2]) or (stored[node.input[2]], blocks)
                added += [self._values(values, bits), self._scales(found, blocks)]
                node.input[1:3] = [tensor.name for tensor in added[-2:]]
                if len(node.input) > OFFSETS_INPUT:
                    added.append(self._scales(stored[node.input[OFFSETS_INPUT]], blocks))
                    node.input[OFFSETS_INPUT] = added[-1].name
            added += [self._floats(name, *scales[name]) for name in node.input if name in scales]
        read = {name for node in nodes for name in node.input}
        kept = [tensor for tensor in graph.initializer if tensor.name in read]
        for tensor in kept:
            if tensor.external_data:
                self._write(tensor, "as it is", lambda rows: rows, self._rows(tensor).size)
        every = {tensor.name: tensor.SerializeToString() for tensor in (*kept, *added)}
        del graph.initializer[:]
        graph.initializer.extend(onnx.TensorProto.FromString(tensor) for tensor in every.values())
        return with_nodes(model, nodes)

    def _values(self, stored: Any, bits: int) -> Any:
        tensor, rows, bands = _copy(stored, f"{stored.name}.packed"), self._rows(stored), -(-stored.dims[0] // _BAND)
        self._write(tensor, f"{bits} bits", lambda piece: packed_values(piece, bits), bands * _BAND * rows.shape[1])
        tensor.dims[:] = (bands, _BAND * rows.shape[1])
        return tensor

    def _scales(self, stored: Any, blocks: int) -> Any:
        """Write scales of products, in 16 bits where these hold them."""
        tensor, bands = _copy(stored, f"{stored.name}.packed"), -(-stored.dims[0] // _BAND)
        scales = self._rows(stored).view(_NUMBERS[stored.data_type])
        kind = np.float16 if are_halves(scales) else np.float32

        def packed(piece: NDArray[np.uint8]) -> NDArray[Any]:
            return packed_scales(_of_blocks(piece.view(scales.dtype), stored.dims[-1], blocks)).astype(kind)

        self._write(tensor, f"scales {blocks}", packed, bands * _BAND * blocks * np.dtype(kind).itemsize)
        tensor.dims[:] = (bands, blocks, _BAND)
        tensor.data_type = tensor.FLOAT16 if kind == np.float16 else tensor.FLOAT
        return tensor

    def _floats(self, name: str, stored: Any, blocks: int) -> Any:
        """Write scales as onnxruntime would compute them from stored ones, into its private memory."""
        tensor, kind = _copy(stored, name), _NUMBERS[stored.data_type]

        def floats(piece: NDArray[np.uint8]) -> NDArray[Any]:
            return _of_blocks(piece.view(kind), stored.dims[-1], blocks).astype(np.float32)

        self._write(tensor, f"floats {blocks}", floats, math.prod(stored.dims[:-1]) * blocks * 4)
        tensor.dims[-1], tensor.data_type = blocks, tensor.FLOAT
        return tensor

    def _rows(self, tensor: Any) -> NDArray[np.uint8]:
        """Return the bytes of a tensor, a row for each index of its first size."""
        place = {entry.key: entry.value for entry in tensor.external_data}
        start = int(place["offset"])
        return self._source[start : start + int(place["length"])].reshape(tensor.dims[0], -1)

    def _write(self, tensor: Any, order: str, change: Callable[[NDArray[np.uint8]], NDArray[Any]], size: int) -> None:
        """Write the tensor's bytes as `change` gives them, in pieces of whole bands, unless they are written."""
        entries, rows = {entry.key: entry for entry in tensor.external_data}, self._rows(tensor)
        key = f"{entries['offset'].value} {rows.shape} {order}"
        if key not in self._written:
            step = max(1, _PIECE_BYTES // (rows.shape[1] * _BAND)) * _BAND
            pieces = (np.ascontiguousarray(rows[start : start + step]) for start in range(0, len(rows), step))
            self._written[key] = self._target.add(map(change, pieces), size)
        entries["offset"].value, entries["length"].value = map(str, self._written[key])
