"""A decoder as ONNX graphs: the body in one or more parts, cut at the exits, and the head.

Instead of a mask, the host feeds the number of tokens in each slot minus one (`seqlens_k`), and the largest number of
tokens in any slot (`total`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from edgekit.model import decoder
from edgekit.model.parts import DeltaRule, Experts, Layer, Rope
from edgekit.model.rope import frequencies
from edgekit.model.spec import ModelSpec
from edgekit_onnx.convolution import write_convolution
from edgekit_onnx.data_file import DataLocation
from edgekit_onnx.delta_rule import write_delta_rule
from edgekit_onnx.experts import write_experts
from edgekit_onnx.graph import MICROSOFT, Graph, GraphShape
from edgekit_onnx.layout import LAYER_INPUTS, SINKS, hidden_name
from edgekit_onnx.packing import OnnxPacking, PackedMatrix

INT32, INT64, FLOAT = ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT


class OnnxDecoder:
    """Writes the parts of one model in the order of its layers, each layer with its weights."""

    def __init__(
        self,
        model: ModelSpec,
        packing: OnnxPacking,
        *,
        positions: int,
        context: int,
        cache: ir.DataType,
        done: Callable[[int], None],
    ) -> None:
        self.model, self.packing, self.cache, self.done = model, packing, cache, done
        self._positions, self._context = positions, context
        self._tables: dict[str, tuple[DataLocation, DataLocation, int]] = {}
        self._table: PackedMatrix | None = None
        self.layer_inputs: Sequence[ir.Value] = ()
        self._stored = {tensor.name for tensor in model.tensors()}
        self._places_of_ones: dict[int, DataLocation] = {}

    def body(self, graph: Graph, start: int, stop: int, between: Sequence[int] = ()) -> None:
        """Write layers `start` to `stop`: from token ids, or hidden states, to hidden states.

        The hidden states after layer n are outputs too, for each n in `between`.
        """
        if start == 0:
            ids = graph.input("input_ids", INT64, ["batch", "tokens"])
            hidden = self.embed(graph, ids)
            if self.model.per_layer_input:
                ops, table = OnnxOps(self, graph), self.packing.table(f"{self.model.prefix}embed_tokens_per_layer")
                inputs = decoder.layer_inputs(self.model, ops, hidden, graph.lookup(table, ids, LAYER_INPUTS))
                # One Split, because onnxruntime would join a Gather for each layer into a Split that it cannot save.
                self.layer_inputs = ops.split(inputs, len(self.model.layers))
        else:
            hidden = graph.input("hidden_in", graph.numbers, ["batch", "tokens", self.model.hidden_size])
        lengths = graph.input("seqlens_k", INT32, ["batch"])
        total = graph.input("total", INT32, [])
        delta: ir.Value | None = None
        for index in range(start, stop):
            ops = OnnxOps(self, graph, index, lengths, total)
            if index in between:
                if delta is not None and self.model.pre_norms:
                    ops.named_sum = hidden_name(index)
                else:
                    hidden, delta = hidden if delta is None else ops.add(hidden, delta), None
                    ops.put_out(hidden, hidden_name(index))
            hidden, delta = decoder.layer(self.model, index, ops, hidden, delta)
            self.done(index + 1)
        if delta is not None:
            hidden = graph.op("Add", hidden, delta, name="hidden")
        graph.output(hidden, "hidden", graph.numbers, ["batch", "tokens", self.model.hidden_size])

    def head(self, graph: Graph) -> None:
        """Write the head: from hidden states to logits, in float32 on every device."""
        rows = graph.input("hidden_in", graph.numbers, ["rows", self.model.hidden_size])
        logits = decoder.head(self.model, OnnxOps(self, graph), rows)
        graph.output(logits, "logits", FLOAT, ["rows", self.model.vocab_size])

    def embed(self, graph: Graph, ids: ir.Value) -> ir.Value:
        """Write the look-up of the tokens' embeddings."""
        self._table = self.packing.table(f"{self.model.prefix}embed_tokens")
        rows, scale = graph.lookup(self._table, ids, "embedding"), self.model.embedding_scale
        if scale == 1.0:
            return rows
        return graph.op("Mul", rows, graph.constant("embedding.factor", scale), name="embedding.scale")

    def head_matrix(self) -> PackedMatrix:
        if not self.model.tied:
            return self.packing.matrix(self.model.head)
        assert self._table is not None, "the body is written before the head"
        return self.packing.head_of(self._table, f"{self.model.prefix}embed_tokens")

    def bias(self, *modules: str) -> DataLocation | None:
        """Return the stacked biases of modules, if they have any."""
        names = [f"{module}.bias" for module in modules]
        if names[0] not in self._stored:
            return None
        biases = [self.packing.weights.floats(name).reshape(-1) for name in names]
        return self.packing.floats(np.concatenate(biases))

    def ones(self, graph: Graph, count: int) -> ir.Value:
        """Return the weights of a norm that has none."""
        if count not in self._places_of_ones:
            self._places_of_ones[count] = self.packing.floats(np.ones(count, np.float32))
        return graph.stored(f"ones.{count}", graph.numbers, [count], self._places_of_ones[count])

    def rotary(self, graph: Graph, layer: Layer) -> tuple[ir.Value, ...]:
        """Return the cosines and sines of this layer's rope; empty if it has none."""
        if layer.rope is None:
            return ()
        if layer.rope not in self._tables:
            inverse, scaling = frequencies(self.model.ropes[layer.rope], self._context)
            angles = np.arange(self._positions, dtype=np.float64)[:, None] * np.asarray(inverse, np.float64)[None, :]
            cosines, sines = (np.float32(scaling) * curve(angles).astype(np.float32) for curve in (np.cos, np.sin))
            self._tables[layer.rope] = self.packing.floats(cosines), self.packing.floats(sines), angles.shape[1]
        cosine, sine, width = self._tables[layer.rope]
        return tuple(
            graph.stored(f"rope.{layer.rope}.{kind}", graph.numbers, [self._positions, width], place)
            for kind, place in (("cos", cosine), ("sin", sine))
        )


def _site(value: ir.Value) -> str:
    """Return the name of the module that made a value, to name what becomes of it."""
    return str(value.name).removesuffix(".product")


class OnnxOps(decoder.Ops[ir.Value]):
    """Writes the operations of one layer, or of the head, for `x` [batch, tokens, width]."""

    def __init__(
        self,
        owner: OnnxDecoder,
        graph: Graph,
        index: int | None = None,
        lengths: ir.Value | None = None,
        total: ir.Value | None = None,
    ) -> None:
        self._owner, self._graph, self._model, self._packing = owner, graph, owner.model, owner.packing
        self._parent = self._model.prefix if index is None else f"{self._model.prefix}layers.{index}."
        self._index, self._layer = index or 0, self._model.layers[index or 0]
        self._lengths, self._total = lengths, total
        self.named_sum: str | None = None  # the output's name of the layer's first sum
        rope = self._model.ropes.get(self._layer.rope or "")
        self._rotates_apart = rope is not None and (self._model.norms_after_rope or _rotates_apart(rope))

    def linear(self, x: ir.Value, module: str) -> ir.Value:
        if module == decoder.HEAD:
            slices = self._owner.head_matrix().slices()  # opening copies one at a time
            parts = [self._graph.linear(x, each, f"{module}.{at}" if at else module) for at, each in enumerate(slices)]
            logits = parts[0] if len(parts) == 1 else self._graph.op("Concat", *parts, name=f"{module}.joined", axis=-1)
            in_float = self._graph.numbers == FLOAT
            return logits if in_float else self._graph.op("Cast", logits, name=f"{module}.cast", to=FLOAT)
        name = f"{self._parent}{module}"
        bias = self._owner.bias(name)
        return self._graph.linear(x, self._packing.matrix(name), name, bias)

    def products(self, x: ir.Value, parts: Sequence[decoder.Projection], *, may_join: bool = False) -> list[ir.Value]:
        modules = [f"{self._parent}{module}" for module in dict.fromkeys(part.module for part in parts)]
        if may_join and not self._rotates_apart and self._packing.can_join(*modules):
            bias = self._owner.bias(*modules)
            return [self._graph.linear(x, self._packing.matrix(*modules), f"{self._parent}self_attn.qkv_proj", bias)]
        if parts[0].rows is None:
            return [self.linear(x, part.module) for part in parts]
        matrix = self._packing.matrix(modules[0])
        return [
            self._graph.linear(x, matrix.rows(part.rows.start, part.rows.stop), f"{self._parent}{part.name}")
            for part in parts
            if part.rows is not None
        ]

    def norm(self, x: ir.Value, name: str | None, heads: tuple[int, int] | None = None) -> ir.Value:
        graph, label = self._graph, f"{x.name}.norm" if name is None else f"{self._parent}{name}"
        epsilon, centred = self._model.norm_epsilon, self._model.centred_norms
        if heads is None:
            return graph.norm(x, self._norm_weight(name), epsilon, label, centred=centred)
        # The CPU's attention operator has no norms of heads.
        x = self._graph.reshaped(x, f"{label}.split", *heads)
        weight = self._owner.ones(graph, heads[1]) if name is None else self._norm_weight(name)
        return self._graph.reshaped(
            graph.norm(x, weight, epsilon, label, centred=centred), f"{label}.joined", prod(heads)
        )

    def add_norm(self, x: ir.Value, y: ir.Value, name: str) -> tuple[ir.Value, ir.Value]:
        label, epsilon, centred = f"{self._parent}{name}", self._model.norm_epsilon, self._model.centred_norms
        normed, total = self._graph.add_norm(x, y, self._norm_weight(name), epsilon, label, centred=centred)
        if self.named_sum:
            self.put_out(total, self.named_sum)
            self.named_sum = None
        return normed, total

    def put_out(self, hidden: ir.Value, name: str) -> None:
        """Make the residual stream an output of the graph, which a drafting head reads."""
        self._graph.output(hidden, name, self._graph.numbers, ["batch", "tokens", self._model.hidden_size])

    def add(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return self._graph.op("Add", x, y, name=f"{_site(y)}.added")

    def multiply(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return self._graph.op("Mul", x, y, name=f"{x.name}.gated")

    def scale(self, x: ir.Value, factor: float) -> ir.Value:
        if factor == 1.0:
            return x
        return self._graph.op("Mul", x, self._graph.constant(f"scale.{factor!r}", factor), name=f"{_site(x)}.scaled")

    def activate(self, x: ir.Value, kind: str) -> ir.Value:
        return self._graph.activation(x, kind, f"{_site(x)}.{kind}")

    def softcap(self, x: ir.Value, cap: float) -> ir.Value:
        limit = self._graph.constant(f"softcap.{cap!r}", cap, FLOAT)
        capped = self._graph.op("Tanh", self._graph.op("Div", x, limit, name="head.scaled"), name="head.tanh")
        return self._graph.op("Mul", capped, limit, name="head.capped")

    def split(self, x: ir.Value, count: int) -> Sequence[ir.Value]:
        return self._graph.ops("Split", x, outputs=count, name=f"{_site(x)}.parts", axis=-1, num_outputs=count)

    def split_gate(self, queries: ir.Value) -> tuple[ir.Value, ir.Value]:
        heads, width = self._model.heads, self._layer.head_dim
        parts = self.split(self._graph.reshaped(queries, f"{queries.name}.by_head", heads, 2 * width), 2)
        query, gate = (self._graph.reshaped(part, f"{part.name}.joined", heads * width) for part in parts)
        return query, gate

    def factor(self, x: ir.Value, name: str) -> ir.Value:
        stored = f"{self._parent}{name}"
        factor = self._graph.stored(stored, self._graph.numbers, [1], self._packing.vector(stored))
        return self._graph.op("Mul", x, factor, name=f"{stored}.scaled")

    def own_input(self) -> ir.Value:
        return self._owner.layer_inputs[self._index]

    def experts(self, x: ir.Value, experts: Experts) -> ir.Value:
        return write_experts(self._graph, self._packing, experts, self._parent.removesuffix("."), x)

    def convolve(self, x: ir.Value, module: str, taps: int) -> ir.Value:
        name = f"{self._parent}{module}"
        return write_convolution(self._graph, self._packing, self._index, name, taps, x, self._owner.bias(name))

    def delta_rule(self, rule: DeltaRule, mixed: ir.Value, decay: ir.Value, strength: ir.Value) -> ir.Value:
        return write_delta_rule(self._graph, self._packing, self._model, self._index, mixed, decay, strength)

    def attend(self, parts: Sequence[ir.Value], late_norms: Sequence[str]) -> ir.Value:
        model, layer, graph, name = self._model, self._layer, self._graph, f"{self._parent}self_attn"
        shape: GraphShape = ["batch", layer.kv_heads, "capacity", layer.head_dim]
        owner = model.kv_owner(self._index)
        past = [graph.input(f"past.{owner}.{kind}", self._owner.cache, shape) for kind in ("key", "value")]
        queries: list[ir.Value | None] = [*parts, *[None] * (3 - len(parts))]
        if not layer.stores_kv:
            queries[1:] = [self._no_tokens(parts[0])] * 2
        rotary = self._owner.rotary(graph, layer)
        assert self._lengths is not None and self._total is not None, "the body has lengths"
        if rotary and self._rotates_apart:
            rope, heads = model.ropes[layer.rope or ""], (model.heads, layer.kv_heads)
            for index, (part, kind) in enumerate(zip(parts[:2], ("query", "key"), strict=False)):
                rotated = f"{name}.{kind}.rotated"
                queries[index] = _write_rotation(graph, part, rope, rotary, self._lengths, heads[index], rotated)
            rotary = ()
        queries[0] = self._weighted(queries[0], late_norms)
        optional: dict[str, Any] = {"scale": model.attention_scale, "do_rotary": int(bool(rotary))}
        if layer.window is not None:
            optional["local_window_size"] = layer.window
        if model.attention_softcap:
            optional["softcap"] = model.attention_softcap
        if layer.rope is not None and model.ropes[layer.rope].interleaved:
            optional["rotary_interleaved"] = 1
        inputs: list[ir.Value | None] = [*queries, *past, self._lengths, self._total, *rotary]
        if model.attention_sinks:
            place = self._packing.vector(f"{name}.sinks")
            sinks = graph.stored(f"{name}.sinks", graph.numbers, [model.heads], place)
            inputs += [*[None] * (SINKS - len(inputs)), sinks]
        output, key, value = graph.ops(
            "GroupQueryAttention", *inputs,
            outputs=3, domain=MICROSOFT, name=name, num_heads=model.heads, kv_num_heads=layer.kv_heads, **optional,
        )  # fmt: skip
        graph.output(key, f"present.{self._index}.key", self._owner.cache, shape)
        graph.output(value, f"present.{self._index}.value", self._owner.cache, shape)
        return output

    def _weighted(self, query: ir.Value | None, norms: Sequence[str]) -> ir.Value | None:
        """Scale queries by the weights of norms that come after the rope (Hunyuan), so that keys can be rotated on."""
        if not norms or query is None:
            return query
        heads, width = self._model.heads, self._layer.head_dim
        query = self._graph.reshaped(query, f"{self._parent}query.by_head", heads, width)
        for norm in norms:
            query = self._graph.op("Mul", query, self._norm_weight(norm), name=f"{self._parent}{norm}.weighted")
        return self._graph.reshaped(query, f"{self._parent}query.joined", heads * width)

    def _no_tokens(self, query: ir.Value) -> ir.Value:
        """Write keys (or values) of no tokens, with which attention reads the cache and adds nothing to it."""
        width = self._layer.kv_heads * self._layer.head_dim
        ends = self._graph.constant(f"none.{width}", [0, width], INT64)
        starts, axes = (
            self._graph.constant(f"none.{part}", at, INT64) for part, at in (("starts", [0, 0]), ("axes", [1, 2]))
        )
        return self._graph.op("Slice", query, starts, ends, axes, name=f"{self._parent}self_attn.none")

    def _norm_weight(self, name: str | None) -> ir.Value:
        assert name is not None, "only norms of heads have no weights"
        stored = f"{self._parent}{name}.weight"
        place = self._packing.vector(stored, add=1.0 if self._model.norm_offset else 0.0)
        return self._graph.stored(stored, self._graph.numbers, [place.length // self._packing.numbers.itemsize], place)


def _rotates_apart(rope: Rope) -> bool:
    """Return True if attention's operator refuses to rotate so many values of a head."""
    return rope.dim % 16 != 0


def _write_rotation(
    graph: Graph, x: ir.Value, rope: Rope, tables: tuple[ir.Value, ...], lengths: ir.Value, heads: int, name: str
) -> ir.Value:
    """Write the rotation of queries or keys `x` [batch, tokens, width]. `lengths` has each text's last position."""
    positions = graph.shared("positions", lambda: _positions(graph, x, lengths))
    return graph.op(
        "RotaryEmbedding", x, positions, *tables, domain=MICROSOFT, name=name,
        num_heads=heads, interleaved=int(rope.interleaved), rotary_embedding_dim=rope.dim,
    )  # fmt: skip


def _positions(graph: Graph, x: ir.Value, lengths: ir.Value) -> ir.Value:
    """Write the position of each token [batch, tokens]: `lengths` is the position of the last one."""
    zero, one = graph.constant("number.0", 0, INT64), graph.constant("number.1", 1, INT64)
    last = graph.op("Cast", lengths, name="positions.last", to=INT64)
    ends = graph.op("Unsqueeze", last, graph.constant("axis.1", [1], INT64), name="positions.ends")
    count = graph.op("Gather", graph.op("Shape", x, name="positions.shape"), one, name="positions.count", axis=0)
    first = graph.op("Sub", ends, graph.op("Sub", count, one, name="positions.back"), name="positions.first")
    steps = graph.op("Range", zero, count, one, name="positions.steps")
    return graph.op("Add", first, steps, name="positions.of_tokens")
