"""Reads the weights back from an artifact's graphs and data file, as the engine uses them.

Names, shapes, blocks and scales are read only from the graphs, independent of the exporter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.contracts.plan import Plan
from edgekit.errors import DamagedArtifact, vendor_errors
from edgekit.formats.chunking import places_of_modules
from edgekit.formats.int_packing import in_slices, unpack
from edgekit.formats.safetensors import TensorBytes
from edgekit.model.spec import ModelSpec
from edgekit.model.tensors import Tensor
from edgekit_onnx.audit import audit
from edgekit_onnx.layout import LAYER_INPUTS, OFFSETS

Floats = NDArray[np.float32]


class _Product(NamedTuple):
    """A stored matrix [outputs, blocks, bytes] with its scales, and what each block adds; `bits` 0 means floats."""

    values: NDArray[Any]
    scales: NDArray[Any] | None
    bits: int
    block: int
    inputs: int
    offsets: NDArray[Any] | None = None


def weights(plan: Plan, files: Path) -> Iterator[tuple[str, Floats]]:
    """Yield every tensor of the model by its name, dequantised."""
    audit(plan, files)
    with vendor_errors("onnx"):
        stored = _Stored(files)
        for tensor in plan.model.tensors():
            yield tensor.name, stored.tensor(plan.model, tensor)


def tensor_places(files: Path) -> list[TensorBytes]:
    """Return the byte ranges of all modules in the data file; joined queries, keys and values are cut apart."""
    import onnx_ir as ir

    places = []
    for path in sorted(files.glob("*.onnx")):
        graph = ir.load(path).graph
        heads = {
            _name(node): [node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads")]
            for node in graph
            if node.op_type == "GroupQueryAttention"
        }
        for name, value in graph.initializers.items():
            stored = value.const_value
            if isinstance(stored, ir.ExternalTensor) and stored.length:
                queries, keys = heads.get(name.rpartition(".qkv_proj.")[0], (1, 0))
                counts = (queries, keys, keys) if keys else (1,)
                start, unit = stored.offset or 0, stored.length // sum(counts)
                for index, count in enumerate(counts):
                    place = TensorBytes(files / Path(stored.location).name, start, count * unit)
                    places.append((f"{name}.{index}.part" if keys else name, place))
                    start += count * unit
    return places_of_modules(places)


class _Stored:
    """The initializers and products of all graphs."""

    def __init__(self, files: Path) -> None:
        import onnx_ir as ir

        self.constants: dict[str, NDArray[Any]] = {}
        self.products: dict[str, _Product] = {}
        self.experts: dict[str, Any] = {}  # nodes by their names
        self._data: dict[Path, NDArray[np.uint8]] = {}
        for path in sorted(files.glob("*.onnx")):
            graph = ir.load(path).graph
            for name, value in graph.initializers.items():
                if value.const_value is not None:
                    self.constants[name] = self._values(value.const_value)
            for node in graph:
                self._node(node)

    def _values(self, stored: Any) -> NDArray[Any]:
        """Return a tensor's values, of which each data file is mapped once.

        `ExternalTensor.numpy` would map the whole file for each tensor, and keep it open until it is garbage-collected.
        """
        import onnx_ir as ir

        if not isinstance(stored, ir.ExternalTensor) or stored.dtype.bitwidth < 8:
            return np.asarray(stored.numpy())
        path = Path(stored.path)
        if path not in self._data:
            self._data[path] = np.memmap(path, np.uint8, "r")
        return np.ndarray(stored.shape.numpy(), stored.dtype.numpy(), self._data[path], stored.offset or 0)

    def _node(self, node: Any) -> None:
        if node.op_type in ("MoE", "QMoE"):
            self.experts[str(node.name)] = node
        inputs = ["" if value is None else str(value.name) for value in node.inputs]
        if node.op_type in ("Cast", "Expand") and inputs[0] in self.constants:  # of scales
            values, *sizes = (self.constants[name] for name in inputs)
            self.constants[str(node.outputs[0].name)] = np.broadcast_to(values, tuple(sizes[0])) if sizes else values
        if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
            attributes = {name: attribute.as_int() for name, attribute in node.attributes.items()}
            values = self.constants[inputs[0 if node.op_type == "GatherBlockQuantized" else 1]]
            bits, block = attributes["bits"], attributes["block_size"]
            width = attributes.get("K", values.shape[-1] * 8 // bits)
            self.products[_name(node)] = _Product(values, self.constants[inputs[2]], bits, block, width)
        elif str(node.name).endswith(OFFSETS):
            site = str(node.name).removesuffix(OFFSETS)
            offsets = self.constants[inputs[0 if node.op_type == "Gather" else 1]]
            self.products[site] = self.products[site]._replace(offsets=offsets)
        elif node.op_type in ("FusedMatMul", "Gather"):
            weight = inputs[0 if node.op_type == "Gather" else 1]
            if weight in self.constants:
                values = self.constants[weight]
                self.products[_name(node)] = _Product(values, None, 0, 0, values.shape[-1])

    def tensor(self, model: ModelSpec, tensor: Tensor) -> Floats:
        """Return one tensor of the model, dequantised."""
        kind = tensor.name.rpartition(".")[2]
        if tensor.role == "embedding":
            is_first = tensor.module == f"{model.prefix}embed_tokens"
            return _floats(self.products["embedding" if is_first else LAYER_INPUTS])
        if tensor.role == "head":
            values, start = np.empty(tensor.shape, np.float32), 0
            for part in (part for name, part in self.products.items() if name.partition(".")[0] == "head"):
                _floats(part, values[start : start + len(part.values)])
                start += len(part.values)
            return values
        if tensor.is_of_expert:
            return self._expert(model, tensor)
        if kind == "bias":
            return self._part(model, tensor, lambda name: self._constant(f"{name}.bias", tensor))
        if tensor.role in ("linear", "router"):
            return self._part(model, tensor, lambda name: _floats(self.products[name]))
        if tensor.role == "other" and len(tensor.shape) == 2:  # a table of an encoder
            return self._constant(tensor.module, tensor).reshape(tensor.shape)
        if tensor.role == "other" and len(tensor.shape) == 1:  # vectors of a delta rule
            return self._constant(tensor.module, tensor)
        if tensor.role == "other":  # the taps of a convolution, one constant each
            taps = [self._constant(f"{tensor.module}.{tap}", tensor) for tap in range(tensor.shape[-1])]
            return np.stack(taps, axis=-1).reshape(tensor.shape)
        values = self._constant(tensor.module, tensor)
        return values - np.float32(1.0) if model.norm_offset else values

    def _expert(self, model: ModelSpec, tensor: Tensor) -> Floats:
        """Return a matrix of one expert, or its bias. Rows of its gate and up projection alternate in one matrix."""
        assert model.experts is not None
        parent, _, rest = tensor.module.rpartition(".experts.")
        expert = int(rest.split(".")[0])
        index = [module.rpartition(".")[2] for module in model.experts.modules(expert)].index(rest.split(".")[1])
        node = self.experts[f"{parent}.experts"]
        each = 3 if node.op_type == "QMoE" else 2  # inputs of a part: values, scales of integers, biases
        first = 2 + each * (index == 2)
        names = ["" if value is None else str(value.name) for value in [*node.inputs[first : first + each], None, None]]
        own = slice(None) if index == 2 else slice(index, None, 2)
        if tensor.role == "bias":
            return np.asarray(self.constants[names[each - 1]][expert][own], np.float32)
        values = self.constants[names[0]][expert][own]
        if each == 2:
            return _floats(_Product(values, None, 0, 0, tensor.shape[-1]))
        bits, block = (node.attributes[name].as_int() for name in ("expert_weight_bits", "block_size"))
        return _floats(_Product(values, self.constants[names[1]][expert][own], bits, block, tensor.shape[-1]))

    def _constant(self, name: str, tensor: Tensor) -> Floats:
        for key in (name, f"{name}.weight"):
            if key in self.constants:
                return np.asarray(self.constants[key], np.float32).reshape(-1)
        raise DamagedArtifact(f"no graph holds {tensor.name}; export the artifact again")

    def _part(self, model: ModelSpec, tensor: Tensor, read: Any) -> Floats:
        """Return a module's rows. Graphs may join queries, keys and values, and split Phi's gate and up."""
        module = tensor.module
        place, _, last = module.rpartition(".")
        joined = f"{place}.qkv_proj"
        if last in ("q_proj", "k_proj", "v_proj") and module not in self.products and joined in self.products:
            layer = model.layers[int(place.removeprefix(f"{model.prefix}layers.").split(".")[0])]
            widths = list(model.qkv_widths(layer))
            start = sum(widths[: "qkv".index(last[0])])
            rows: Floats = read(joined)[start : start + widths["qkv".index(last[0])]]
            return rows
        if last == "gate_up_proj" and module not in self.products:
            return np.concatenate([read(f"{place}.gate_proj"), read(f"{place}.up_proj")])
        whole: Floats = read(module)
        return whole


def _name(node: Any) -> str:
    return str(node.name).removesuffix(".product")


def _floats(product: _Product, into: Floats | None = None) -> Floats:
    """Return integer × scale, written into an array if one is given."""
    values, rows = product.values, len(product.values)
    if into is None and not product.bits:
        return np.asarray(values, np.float32)
    into = np.empty((rows, product.inputs), np.float32) if into is None else into
    if not product.bits:
        into[:] = values
        return into
    assert product.scales is not None
    packed, scales = values.reshape(rows, -1), product.scales.reshape(rows, -1)
    padded = packed.shape[1] * 8 // product.bits

    def dequantised(some: slice) -> Floats:
        integers = unpack(np.ascontiguousarray(packed[some]).view(np.uint8), product.bits, padded)
        repeated = np.repeat(np.asarray(scales[some], np.float32), product.block, axis=1)[:, : product.inputs]
        values = integers[:, : product.inputs] * repeated
        if product.offsets is not None:
            values += np.repeat(np.asarray(product.offsets[some], np.float32), product.block, axis=1)
        return values

    return in_slices(into, dequantised)
