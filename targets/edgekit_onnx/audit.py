"""Checks the graphs of an artifact before onnxruntime reads them.

An artifact may come from anywhere, and its manifest only proves that it is complete. A graph passes if this exporter
could have written it for the plan: known operators, inputs and outputs, and weights inside the data file with exactly
the bytes that their shapes need.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edgekit.common.base import Frozen
from edgekit.common.bounds import Count, Sha256
from edgekit.common.files import is_shared
from edgekit.common.machine_facts import read_fact, write_fact
from edgekit.contracts.plan import Plan
from edgekit.contracts.recurrent import recurrent_arrays
from edgekit.errors import DamagedArtifact, quote_short
from edgekit_onnx.data_file import DATA_FILE
from edgekit_onnx.layout import (
    LAYER_INPUTS,
    SINKS,
    GraphPart,
    hidden_name,
    hidden_outputs,
    last_graph,
    parts_of,
    table_rows,
    window_masks,
)

_MAX_GRAPH_BYTES = 64 << 20
_MAX_INLINE_BYTES = 4096
_MAX_FOLDED_ITEMS, _MAX_RANK = 4096, 8
_MAX_NODES_A_LAYER, _MAX_OTHER_NODES = 80, 256
_DOMAINS = ["", "com.microsoft"]
_OPERATORS = {
    "Add",
    "Cast",
    "Div",
    "Expand",
    "Gather",
    "Gelu",
    "Mul",
    "Reshape",
    "SimplifiedLayerNormalization",
    "Tanh",
}
_OPERATORS |= {"FusedMatMul", "GatherBlockQuantized", "GroupQueryAttention", "MatMulNBits", "QuickGelu"}
_OPERATORS |= {"Exp", "LinearAttention", "Neg", "ReduceLogSumExp", "Shape", "Sigmoid", "Sub", "Unsqueeze"}
_OPERATORS |= {"Concat", "SkipSimplifiedLayerNormalization", "Slice", "Split"}
_OPERATORS |= {"LayerNormalization", "MultiHeadAttention", "SkipLayerNormalization"}
_OPERATORS |= {"MoE", "QMoE", "Relu", "ReduceSum", "Softmax", "TopK"}
_OPERATORS |= {"Range", "RotaryEmbedding"}  # the kernel refuses positions beyond its tables
# onnx.TensorProto's numbers: float32, uint8, int32, int64, float16.
_FLOAT, _UINT8, _INT32, _INT64, _FLOAT16 = 1, 2, 6, 7, 10
_ITEM_BYTES = {_FLOAT: 4, _UINT8: 1, _INT32: 4, _INT64: 8, _FLOAT16: 2}

_FACT = "audited"

Signature = Mapping[str, tuple[int, tuple[int | None, ...]]]  # name → type and shape; None: any size


class AuditRecord(Frozen):
    """The graphs passed for plans of at most that many positions. A damaged number does not fit `stamp`."""

    positions: Count
    stamp: Sha256

    @classmethod
    def of(cls, key: str, positions: int) -> AuditRecord:
        return cls(positions=positions, stamp=hashlib.sha256(f"{key} {positions}".encode()).hexdigest())

    def covers(self, key: str, positions: int) -> bool:
        return self.positions >= positions and self == AuditRecord.of(key, self.positions)


class CheckedGraph(NamedTuple):
    """A graph that passed the audit: open exactly these bytes."""

    name: str
    data: bytes


def audit(plan: Plan, files: Path) -> list[CheckedGraph]:
    """Check and return the graphs of an artifact: the body's parts and the head, or the encoder."""
    size = regular_file(files / DATA_FILE).st_size
    parts = [*parts_of(plan), None]
    names = [last_graph(plan) if part is None else part.name for part in parts]
    graphs = [CheckedGraph(name, _read(files / f"{name}.onnx")) for name in names]
    key, positions = _key(plan, parts, size, graphs), table_rows(plan)
    known = read_fact(key, _FACT, AuditRecord)
    if known is None or not known.covers(key, positions):
        for part, graph in zip(parts, graphs, strict=True):
            _Graph(plan, part, files / f"{graph.name}.onnx", size).check(graph.data)
        write_fact(key, _FACT, AuditRecord.of(key, positions))
    return graphs


def _key(plan: Plan, parts: Sequence[GraphPart | None], size: int, graphs: Sequence[CheckedGraph]) -> str:
    """Return a hash of everything except positions that an audit depends on, including these rules.

    It stays the same if an artifact is opened with other context, sequences or threads.
    """
    asked = [part and (part, hidden_outputs(plan, part)) for part in parts]
    described = f"{size} {plan.backend} {plan.storage.kv_bits == 16} {asked} {plan.model.model_dump_json()}"
    digest = hashlib.sha256(Path(__file__).read_bytes() + described.encode())
    for graph in graphs:
        digest.update(f"{graph.name} {len(graph.data)} ".encode() + graph.data)
    return digest.hexdigest()


def regular_file(path: Path) -> os.stat_result:
    """Return the status of a file. Raise `DamagedArtifact` unless it is a regular file without other links."""
    try:
        info = path.lstat()
    except OSError as error:
        raise DamagedArtifact(f"{path}: is missing; export or copy the artifact again") from error
    if not stat.S_ISREG(info.st_mode) or is_shared(path, info):
        raise DamagedArtifact(f"{path}: is a link or not a file; copy the artifact so that its files are its own")
    return info


def _read(path: Path) -> bytes:
    """Return the bytes of a regular file, read through the handle that was checked."""
    if regular_file(path).st_size > _MAX_GRAPH_BYTES:
        raise DamagedArtifact(f"{path}: is too large for a graph with weights outside")
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(handle, "rb") as file:
            return file.read(_MAX_GRAPH_BYTES)
    except OSError as error:
        raise DamagedArtifact(f"{path}: cannot be read: {error.strerror}") from error


class _Graph:
    """The check of one graph."""

    def __init__(self, plan: Plan, part: GraphPart | None, place: Path, data_bytes: int) -> None:
        self.plan, self.part, self.place, self.data_bytes = plan, part, place, data_bytes
        self.numbers = _FLOAT16 if plan.backend == "cuda" else _FLOAT
        self.shapes: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.kinds: dict[str, str] = {}  # of each value: what it is, or the operator that computes it
        self.sizes: dict[str, tuple[int, ...]] = {}  # the values of small integer tensors
        self.expanded: set[str] = set()  # scales for blocks that no product has read yet
        self.computed = 0.0  # items of large values that onnxruntime computes as it loads
        self.folded: dict[str, float] = {}  # the most items of a value that onnxruntime can compute as it loads

    def refuse(self, what: str) -> DamagedArtifact:
        return DamagedArtifact(f"{self.place}: {what}; it was not written by this exporter: export again")

    def check(self, data: bytes) -> None:
        try:
            self._check(data)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            # Names that are not UTF-8 come as bytes where text is expected.
            raise self.refuse(f"is malformed ({type(error).__name__})") from error

    def _check(self, data: bytes) -> None:
        import onnx

        model = onnx.ModelProto()
        try:
            model.ParseFromString(data)
        except Exception as error:
            raise self.refuse(f"is not an ONNX graph ({type(error).__name__})") from error
        graph = model.graph
        if model.functions or model.training_info or graph.sparse_initializer or graph.quantization_annotation:
            raise self.refuse("holds functions, training data or sparse weights")
        if sorted(entry.domain for entry in model.opset_import) != _DOMAINS:
            raise self.refuse("uses operators of other domains, or does not state them")
        for tensor in graph.initializer:
            self._tensor(tensor)
        for found, expected, what in (
            (graph.input, self._inputs(), "inputs"),
            (graph.output, self._outputs(), "outputs"),
        ):
            self._signature(found, expected, what)
        layers = len(self.plan.model.layers) if self.plan.model.encoder else 0
        layers += 0 if self.part is None else self.part.stop - self.part.start
        if len(graph.node) > layers * _MAX_NODES_A_LAYER + _MAX_OTHER_NODES:
            raise self.refuse(f"has {len(graph.node)} nodes for {layers} layers")
        self.kinds |= dict.fromkeys((value.name for value in graph.input), "input")
        self.folded = {name: math.prod(dims) for name, (_, dims) in self.shapes.items()}
        for node in graph.node:
            self._node(node)
            self._check_folding(node)
        if self.expanded:
            raise self.refuse(f"expands {quote_short(sorted(self.expanded)[0])}, which no product reads")

    def _tensor(self, tensor: Any) -> None:
        name, dims = tensor.name, tuple(tensor.dims)
        if not name or name in self.shapes:
            raise self.refuse(f"tensor {quote_short(name)} occurs twice or has no name")
        if tensor.data_type not in _ITEM_BYTES or len(dims) > 3 or any(size < 1 for size in dims):
            raise self.refuse(
                f"tensor {quote_short(name)} has the type {tensor.data_type} and the shape {quote_short(dims)}"
            )
        needed = math.prod(dims) * _ITEM_BYTES[tensor.data_type]
        if tensor.data_location == tensor.EXTERNAL:
            self._external(tensor, needed)
        elif tensor.external_data or len(tensor.raw_data) != needed or needed > _MAX_INLINE_BYTES:
            raise self.refuse(
                f"tensor {quote_short(name)} needs {quote_short(needed)} bytes and holds {len(tensor.raw_data)}"
            )
        elif tensor.data_type == _INT64:
            self.sizes[name] = struct.unpack(f"<{math.prod(dims)}q", tensor.raw_data)
        self.shapes[name] = (tensor.data_type, dims)
        self.kinds[name] = {bytes(8): "zero", b"\1" + bytes(7): "one"}.get(tensor.raw_data, "constant")

    def _external(self, tensor: Any, needed: int) -> None:
        """Refuse external data unless it is a range of exactly the needed bytes inside the artifact's data file."""
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if set(entries) != {"location", "offset", "length"} or len(tensor.external_data) != 3 or tensor.raw_data:
            raise self.refuse(f"tensor {quote_short(tensor.name)} has data fields {quote_short(sorted(entries))}")
        if entries["location"] != DATA_FILE:
            raise self.refuse(
                f"tensor {quote_short(tensor.name)} points at {quote_short(entries['location'])}, not at {DATA_FILE}"
            )
        if not all(
            entries[key].isascii() and entries[key].isdigit() and len(entries[key]) < 20 for key in ("offset", "length")
        ):
            raise self.refuse(f"tensor {quote_short(tensor.name)} has an offset or a length that is not a number")
        offset, length = int(entries["offset"]), int(entries["length"])
        if length != needed or offset + length > self.data_bytes:
            raise self.refuse(
                f"tensor {quote_short(tensor.name)} needs {quote_short(needed)} bytes; it claims {length} at {offset} "
                f"of {self.data_bytes}"
            )

    def _signature(self, found: Any, expected: Signature, what: str) -> None:
        names = [value.name for value in found]
        if sorted(names) != sorted(expected):
            raise self.refuse(f"has the {what} {quote_short(sorted(names))}")
        for value in found:
            kind, shape = expected[value.name]
            dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim]
            fits = len(dims) == len(shape) and all(a == b for a, b in zip(dims, shape, strict=False))
            if value.type.tensor_type.elem_type != kind or not fits:
                raise self.refuse(f"{quote_short(value.name)} has the shape {quote_short(dims)}, expected {shape}")

    def _inputs(self) -> Signature:
        model = self.plan.model
        if model.encoder:
            found: Signature = {"input_ids": (_INT64, (None, None)), "lengths": (_INT32, (None,))}
            if not model.is_bert:
                return {**found, **dict.fromkeys(window_masks(model), (self.numbers, (1, 1, None, None)))}
            types: Signature = {"types": (_INT64, (None, None))} if model.encoder.classifier else {}
            return {**found, "positions": (_INT64, (None,)), **types}
        if self.part is None:
            return {"hidden_in": (self.numbers, (None, model.hidden_size))}
        first: dict[str, tuple[int, tuple[int | None, ...]]] = {
            "hidden_in": (self.numbers, (None, None, model.hidden_size))
        }
        if self.part.start == 0:
            first = {"input_ids": (_INT64, (None, None))}
        if any(layer.is_recurrent for layer in model.layers[self.part.start : self.part.stop]):
            first["kept"] = (_INT64, (1,))
        return {**first, "seqlens_k": (_INT32, (None,)), "total": (_INT32, ()), **dict(self._cache("past"))}

    def _outputs(self) -> Signature:
        model = self.plan.model
        if model.encoder:
            states = {"hidden": (self.numbers, (None, None, model.vector_size))}
            return {**states, "scores": (self.numbers, (None, 1))} if model.encoder.classifier else states
        if self.part is None:
            return {"logits": (_FLOAT, (None, model.vocab_size))}
        names = ["hidden", *map(hidden_name, hidden_outputs(self.plan, self.part))]
        states = dict.fromkeys(names, (self.numbers, (None, None, model.hidden_size)))
        return {**states, **dict(self._cache("present"))}

    def _cache(self, word: str) -> Iterator[tuple[str, tuple[int, tuple[int | None, ...]]]]:
        assert self.part is not None
        kind = _FLOAT16 if self.plan.storage.kv_bits == 16 else _FLOAT
        layers = range(self.part.start, self.part.stop)
        for each in recurrent_arrays(self.plan.model):
            if each.layer in layers:
                yield f"{word}.{each.layer}.{each.name}", (_FLOAT, (None, *each.shape))
        for index in layers:
            layer = self.plan.model.layers[index]
            written = index if word == "present" else self.plan.model.kv_owner(index)
            for name in () if layer.is_recurrent else ("key", "value"):
                yield f"{word}.{written}.{name}", (kind, (None, layer.kv_heads, None, layer.head_dim))

    def _node(self, node: Any) -> None:
        if node.op_type not in _OPERATORS or node.domain not in _DOMAINS:
            raise self.refuse(f"uses the operator {quote_short(node.domain)} {quote_short(node.op_type)}")
        if any(attribute.type not in (1, 2, 3) for attribute in node.attribute):  # float, int, string
            raise self.refuse(f"node {quote_short(node.name)} carries more than plain attributes")
        options = {attribute.name: attribute.i for attribute in node.attribute}
        if node.op_type == "Expand" or (node.op_type == "Cast" and node.input[0] in self.shapes):
            self._scales(node, options)
        if node.op_type == "MatMulNBits":
            self._product(node, options)
        if node.op_type == "GatherBlockQuantized":
            self._lookup(node, options)
        if node.op_type == "GroupQueryAttention":
            self._attention(node, options)
        if node.op_type in ("MoE", "QMoE"):
            self._experts(node, options)
        if node.op_type == "LinearAttention":
            self._linear_attention(node, options)

    def _check_folding(self, node: Any) -> None:
        """Bound what onnxruntime computes from constants and known shapes as it loads: bytes could become gigabytes."""
        operands = [name for name in node.input if name]
        kinds = [self.kinds.get(name) for name in operands]
        if None in kinds:
            raise self.refuse(f"node {quote_short(node.name)} takes what no node before it computes")
        if node.op_type == "Range" and kinds != ["zero", "axis", "one"]:
            raise self.refuse(f"range {quote_short(node.name)} does not count an axis")
        # A result of one operand is no larger than it, one of several at most the product; not a number: known later.
        counts = [self.folded.get(name, math.nan) for name in operands]
        most = counts[0] if len(counts) == 1 else math.prod(count + 1 for count in counts)
        if node.op_type in ("Shape", "Range"):  # a range has as many items as an axis
            most = _MAX_RANK if node.op_type == "Shape" else math.inf
        elif node.op_type == "Expand":
            most = math.prod(self.sizes.get(node.input[1], (math.inf,)))  # as large as weights in the file allow
        elif len(counts) > 1 and most > _MAX_FOLDED_ITEMS:
            raise self.refuse(f"node {quote_short(node.name)} computes up to {most:,} items from constants alone")
        # Few operators have scales alone for inputs, of which a file holds more bytes than they have items.
        self.computed += most if _MAX_FOLDED_ITEMS < most < math.inf else 0
        if self.computed > self.data_bytes:
            raise self.refuse(f"node {quote_short(node.name)} and others compute too much from constants alone")
        is_axis = node.op_type == "Gather" and kinds[0] == "Shape"
        self.kinds |= dict.fromkeys(node.output, "axis" if is_axis else node.op_type)
        self.folded |= dict.fromkeys(node.output, most)

    def _scales(self, node: Any, options: Mapping[str, int]) -> None:
        """Note the type and shape of scales that are computed from stored ones: as floats, or repeated for blocks."""
        kind, shape = self.shapes.get(node.input[0], (0, ()))
        if node.op_type == "Cast" and options.get("to") in _ITEM_BYTES:
            self.shapes[node.output[0]] = (options["to"], shape)
        if node.op_type != "Expand":
            return
        sizes = self.sizes.get(node.input[1], ()) if len(node.input) == 2 else ()
        if shape[-1:] != (1,) or sizes[:-1] != shape[:-1] or sizes[-1] < 1:
            raise self.refuse(f"node {quote_short(node.name)} does not repeat one scale of each row")
        self.shapes[node.output[0]] = (kind, sizes)
        self.expanded.add(node.output[0])

    def _product(self, node: Any, options: Mapping[str, int]) -> None:
        """Check that attributes agree with the weights' shapes, because the kernel trusts them."""
        outputs, inputs, bits, block = (options.get(key, 0) for key in ("N", "K", "bits", "block_size"))
        if bits not in (4, 8) or block not in (16, 32, 64, 128, 256) or outputs < 1 or inputs < 1:
            raise self.refuse(f"product {quote_short(node.name)} has attributes {quote_short(dict(options))}")
        blocks = -(-inputs // block)
        expected = [(_UINT8, (outputs, blocks, block * bits // 8)), (self.numbers, (outputs, blocks))]
        extra = [name for name in node.input[3:5] if name]
        if len(node.input) > 6 or extra or [self.shapes.get(name) for name in node.input[1:3]] != expected:
            raise self.refuse(f"product {quote_short(node.name)} does not fit its weights")
        if len(node.input) == 6 and self.shapes.get(node.input[5]) != (self.numbers, (outputs,)):
            raise self.refuse(f"product {quote_short(node.name)} does not fit its bias")
        self.expanded.discard(node.input[2])

    def _lookup(self, node: Any, options: Mapping[str, int]) -> None:
        model, bits, block = self.plan.model, options.get("bits", 0), options.get("block_size", 0)
        if bits not in (4, 8) or block < 16 or block & (block - 1):
            raise self.refuse(f"lookup {quote_short(node.name)} has attributes {quote_short(dict(options))}")
        rows, width = model.vocab_size, model.hidden_size
        if model.per_layer_input and node.name.removesuffix(".product") == LAYER_INPUTS:
            rows, width = model.per_layer_input.vocab_size, len(model.layers) * model.per_layer_input.size
        expected = [(_UINT8, (rows, width * bits // 8)), (self.numbers, (rows, -(-width // block)))]
        if len(node.input) != 3 or [self.shapes.get(node.input[place]) for place in (0, 2)] != expected:
            raise self.refuse(f"lookup {quote_short(node.name)} does not fit its table")

    def _attention(self, node: Any, options: Mapping[str, int]) -> None:
        """Check sinks, and that rotary tables have a row for every position: the kernel would read past their end."""
        sinks = [self.shapes.get(name) for name in node.input[SINKS : SINKS + 1] if name]
        if sinks != [(self.numbers, (self.plan.model.heads,))] * self.plan.model.attention_sinks:
            raise self.refuse(f"attention {quote_short(node.name)} has sinks {quote_short(sinks)}")
        if not options.get("do_rotary"):
            return
        for name in node.input[7:9]:
            kind, shape = self.shapes.get(name, (0, ()))
            if kind != self.numbers or len(shape) != 2 or shape[0] < table_rows(self.plan):
                raise self.refuse(f"{quote_short(name)} is not a rotary table of {table_rows(self.plan)} positions")

    def _experts(self, node: Any, options: Mapping[str, int]) -> None:
        """Check that attributes and weights agree with the plan's experts."""
        experts, hidden = self.plan.model.experts, self.plan.model.hidden_size
        bits, block = options.get("expert_weight_bits", 0), options.get("block_size", 0)
        if experts is None or options.get("k") != experts.active or options.get("swiglu_fusion") != 1:
            raise self.refuse(f"experts {quote_short(node.name)} have attributes {quote_short(dict(options))}")
        expected: list[tuple[int, tuple[int, ...]] | None] = []
        for outputs, inputs in ((2 * experts.intermediate_size, hidden), (hidden, experts.intermediate_size)):
            if node.op_type == "MoE":
                expected.append((self.numbers, (experts.count, outputs, inputs)))
            elif bits not in (4, 8) or block not in (16, 32, 64, 128) or inputs % block:
                raise self.refuse(f"experts {quote_short(node.name)} have attributes {quote_short(dict(options))}")
            else:
                expected.append((_UINT8, (experts.count, outputs, inputs * bits // 8)))
                expected.append((self.numbers, (experts.count, outputs, inputs // block)))
            expected.append((self.numbers, (experts.count, outputs)) if experts.linear_bias else None)
        stop = 2 + len(expected)
        stored = [self.shapes.get(name, (0, ())) if name else None for name in node.input[2:stop]]
        rest = [name for name in node.input[stop:] if name]
        stored += [None] * (len(expected) - len(stored))
        if stored != expected or len(rest) > 1 or len(node.input) > 15:
            raise self.refuse(f"experts {quote_short(node.name)} do not fit their weights")
        self.expanded -= {*node.input[2:stop]}

    def _linear_attention(self, node: Any, options: Mapping[str, int]) -> None:
        """Check that the heads agree with a layer of the plan; refuse a `state_window`."""
        rules = [layer.delta_rule for layer in self.plan.model.layers if layer.delta_rule]
        heads = options.get("q_num_heads"), options.get("kv_num_heads")
        if options.get("state_window") or heads not in [(rule.key_heads, rule.value_heads) for rule in rules]:
            raise self.refuse(f"linear attention {quote_short(node.name)} has attributes {quote_short(dict(options))}")
