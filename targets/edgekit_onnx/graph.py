"""Writes one ONNX graph: inputs, outputs, initializers in the data file, and the operators that decoders need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import tape

from edgekit_onnx.data_file import DATA_FILE, DataLocation
from edgekit_onnx.layout import HEAD, OFFSETS
from edgekit_onnx.packing import PackedMatrix, PackedScales

MICROSOFT = "com.microsoft"
OPSETS = {"": 21, MICROSOFT: 1}
IR_VERSION = 10
GraphShape = Sequence[int | str]


class Graph:
    """A graph under construction. `numbers` is the type of its activations."""

    def __init__(self, name: str, numbers: ir.DataType, accuracy_level: int) -> None:
        self.name, self.numbers, self.accuracy_level = name, numbers, accuracy_level
        self._tape = tape.Tape()
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._initializers: dict[str, ir.Value] = {}
        self._shared: dict[str, ir.Value] = {}

    def input(self, name: str, kind: ir.DataType, shape: GraphShape) -> ir.Value:
        """Return the input called `name`, adding it if the graph lacks it."""
        known = next((value for value in self._inputs if value.name == name), None)
        if known is None:
            known = ir.val(name, kind, ir.Shape(shape))
            self._inputs.append(known)
        return known

    def output(self, value: ir.Value, name: str, kind: ir.DataType, shape: GraphShape) -> None:
        value.name, value.type, value.shape = name, ir.TensorType(kind), ir.Shape(shape)
        self._outputs.append(value)

    def op(self, kind: str, *inputs: ir.Value | None, domain: str = "", name: str, **attributes: Any) -> ir.Value:
        """Add a node; return its only output, which has the node's name."""
        value = self._tape.op(kind, inputs, attributes, domain=domain, name=name)
        value.name = name
        return value

    def ops(
        self, kind: str, *inputs: ir.Value | None, outputs: int, domain: str = "", name: str, **attributes: Any
    ) -> Sequence[ir.Value]:
        """Add a node with several outputs."""
        values: Sequence[ir.Value] = self._tape.op_multi_out(
            kind, inputs, attributes, num_outputs=outputs, domain=domain, name=name
        )
        for index, value in enumerate(values):
            value.name = f"{name}.{index}"
        return values

    def stored(self, name: str, kind: ir.DataType, shape: Sequence[int], place: DataLocation) -> ir.Value:
        """Return an initializer whose bytes are in the data file."""
        if name not in self._initializers:
            tensor = ir.ExternalTensor(DATA_FILE, place.offset, place.length, kind, shape=ir.Shape(shape), name=name)
            self._initializers[name] = ir.val(name, const_value=tensor)
        return self._initializers[name]

    def scales(self, name: str, stored: PackedScales | None, shape: Sequence[int]) -> ir.Value:
        """Return scales or offsets in `shape`, which onnxruntime computes from stored ones when it opens the graph."""
        assert stored is not None
        place, kind, columns = stored
        value = self.stored(name, ir.DataType.from_numpy(kind), [*shape[:-1], columns], place)
        if value.dtype != self.numbers:
            value = self.op("Cast", value, name=f"{name}.floats", to=self.numbers)
        if columns == shape[-1]:
            return value
        sizes = self.constant(f"of.{'.'.join(map(str, shape))}", shape, ir.DataType.INT64)
        return self.op("Expand", value, sizes, name=f"{name}.of_blocks")

    def constant(self, name: str, values: Any, kind: ir.DataType | None = None) -> ir.Value:
        """Return a small initializer whose bytes are in the graph."""
        if name not in self._initializers:
            array = np.asarray(values, dtype=(kind or self.numbers).numpy())
            self._initializers[name] = ir.val(name, const_value=ir.tensor(array, name=name))
        return self._initializers[name]

    def shared(self, name: str, write: Callable[[], ir.Value]) -> ir.Value:
        """Return a value that several layers read; `write` is called for the first of them."""
        if name not in self._shared:
            self._shared[name] = write()
        return self._shared[name]

    def linear(self, x: ir.Value, matrix: PackedMatrix, name: str, bias: DataLocation | None = None) -> ir.Value:
        """Write `x` times the transposed matrix, plus the bias."""
        n, k = matrix.outputs, matrix.inputs
        added = None if bias is None else self.stored(f"{name}.bias", self.numbers, [n], bias)
        if not matrix.bits:
            weight = self.stored(f"{name}.weight", self.numbers, [n, k], matrix.values)
            product = self.op("FusedMatMul", x, weight, domain=MICROSOFT, name=f"{name}.product", transB=1)
            return product if added is None else self.op("Add", product, added, name=f"{name}.sum")
        blob = matrix.block * matrix.bits // 8
        values = self.stored(f"{name}.weight", ir.DataType.UINT8, [n, matrix.blocks, blob], matrix.values)
        scales = self.scales(f"{name}.scales", matrix.scales, [n, matrix.blocks])
        inputs = [x, values, scales] + ([None, None, added] if added is not None else [])
        product = self.op(
            "MatMulNBits", *inputs, domain=MICROSOFT, name=f"{name}.product",
            K=k, N=n, bits=matrix.bits, block_size=matrix.block, accuracy_level=self.accuracy_level,
        )  # fmt: skip
        if matrix.offsets is None:
            return product
        sums = self.shared(f"{x.name}.sums.{matrix.block}", lambda: self._block_sums(x, matrix))
        offsets = self.scales(f"{name}.added", matrix.offsets, [n, matrix.blocks])
        added = self.op("FusedMatMul", sums, offsets, domain=MICROSOFT, name=f"{name}{OFFSETS}", transB=1)
        return self.op("Add", product, added, name=f"{name}.moved")

    def _block_sums(self, x: ir.Value, matrix: PackedMatrix) -> ir.Value:
        """Sum the inputs of each block of the matrix. Only the head has `x` without an axis of tokens."""
        sizes = [*[0] * (1 if self.name == HEAD else 2), matrix.blocks, matrix.block]
        shape = self.constant(f"blocks.{'.'.join(map(str, sizes))}", sizes, ir.DataType.INT64)
        blocks = self.op("Reshape", x, shape, name=f"{x.name}.blocks.{matrix.block}")
        last = self.constant("axis.last", [-1], ir.DataType.INT64)
        return self.op("ReduceSum", blocks, last, name=f"{x.name}.sums.{matrix.block}", keepdims=0)

    def lookup(self, table: PackedMatrix, ids: ir.Value, name: str) -> ir.Value:
        """Write the look-up of rows by ids."""
        rows, width = table.outputs, table.inputs
        if table.scales is None:
            weight = self.stored(f"{name}.weight", self.numbers, [rows, width], table.values)
            return self.op("Gather", weight, ids, name=name, axis=0)
        weight = self.stored(f"{name}.weight", ir.DataType.UINT8, [rows, width * table.bits // 8], table.values)
        scales = self.scales(f"{name}.scales", table.scales, [rows, -(-width // table.block)])
        found = self.op(
            "GatherBlockQuantized", weight, ids, scales, domain=MICROSOFT,
            name=name if table.offsets is None else f"{name}.product",
            bits=table.bits, block_size=table.block, gather_axis=0, quantize_axis=1,
        )  # fmt: skip
        if table.offsets is None:
            return found
        offsets = self.scales(f"{name}.added", table.offsets, [rows, table.blocks])
        offsets = self.op("Gather", offsets, ids, name=f"{name}{OFFSETS}", axis=0)
        last = self.constant("axis.last", [-1], ir.DataType.INT64)
        column = self.op("Unsqueeze", offsets, last, name=f"{name}.of_blocks")
        blocks = self.reshaped(found, f"{name}.blocks", table.blocks, table.block)
        return self.reshaped(self.op("Add", blocks, column, name=f"{name}.moved"), name, width)

    def reshaped(self, x: ir.Value, name: str, *sizes: int) -> ir.Value:
        """Reshape each token's values to `sizes`."""
        shape = self.constant(f"by.{'.'.join(map(str, sizes))}", [0, -1, *sizes], ir.DataType.INT64)
        return self.op("Reshape", x, shape, name=name)

    def activation(self, x: ir.Value, kind: str, name: str) -> ir.Value:
        """Write an activation, by its name in `ModelSpec`, or `sigmoid`."""
        match kind:
            case "silu":
                return self.op("QuickGelu", x, domain=MICROSOFT, name=name, alpha=1.0)
            case "gelu_tanh":
                return self.op("Gelu", x, name=name, approximate="tanh")
            case "relu2":
                positive = self.op("Relu", x, name=f"{name}.positive")
                return self.op("Mul", positive, positive, name=name)
            case "sigmoid":
                return self.op("Sigmoid", x, name=name)
        assert kind == "gelu", kind
        return self.op("Gelu", x, name=name)

    def norm(self, x: ir.Value, weight: ir.Value, epsilon: float, name: str, *, centred: bool = False) -> ir.Value:
        """Write an RMS norm over the last axis; `centred`: a layer norm without a bias."""
        if centred:
            return self.op("LayerNormalization", x, weight, name=name, epsilon=epsilon, axis=-1, stash_type=1)
        return self.op("SimplifiedLayerNormalization", x, weight, name=name, epsilon=epsilon, axis=-1, stash_type=1)

    def add_norm(
        self, x: ir.Value, y: ir.Value, weight: ir.Value, epsilon: float, name: str, *, centred: bool = False
    ) -> tuple[ir.Value, ir.Value]:
        """Write `x + y` and its norm; return the norm and the sum."""
        kind = "SkipLayerNormalization" if centred else "SkipSimplifiedLayerNormalization"
        outputs = self.ops(kind, x, y, weight, outputs=4, domain=MICROSOFT, name=name, epsilon=epsilon)
        outputs[1].name = outputs[2].name = ""
        return outputs[0], outputs[3]

    def save(self, folder: Path) -> None:
        """Write the graph without the bytes of the data file."""
        graph = ir.Graph(
            self._inputs, self._outputs, nodes=self._tape.nodes, initializers=tuple(self._initializers.values()),
            opset_imports=OPSETS, name=self.name,
        )  # fmt: skip
        ir.save(ir.Model(graph, ir_version=IR_VERSION, producer_name="edgekit"), folder / f"{self.name}.onnx")
