"""A decoder as ONNX graphs: the body in one or more parts, cut at the exits, and the head.

Instead of a mask, the host feeds the number of tokens in each slot minus one (`seqlens_k`), and the largest number of
tokens in any slot (`total`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from edgekit.model.parts import Layer
from edgekit.model.rope import frequencies
from edgekit.model.spec import ModelSpec
from edgekit_onnx.convolution import write_convolution
from edgekit_onnx.data_file import DataLocation
from edgekit_onnx.delta_rule import write_delta_rule
from edgekit_onnx.experts import write_experts
from edgekit_onnx.graph import MICROSOFT, Graph, GraphShape
from edgekit_onnx.late_norms import write_late_norms
from edgekit_onnx.layer_inputs import add_own_input, write_layer_inputs
from edgekit_onnx.layout import SINKS, hidden_name
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
        self.model, self.packing, self.cache, self._done = model, packing, cache, done
        self._positions, self._context = positions, context
        self._tables: dict[str, tuple[DataLocation, DataLocation, int]] = {}
        self._table: PackedMatrix | None = None
        self._layer_inputs: Sequence[ir.Value] = ()
        self._places_of_ones: dict[int, DataLocation] = {}

    def body(self, graph: Graph, start: int, stop: int, between: Sequence[int] = ()) -> None:
        """Write layers `start` to `stop`: from token ids, or hidden states, to hidden states.

        The hidden states after layer n are outputs too, for each n in `between`.
        """
        if start == 0:
            ids = graph.input("input_ids", INT64, ["batch", "tokens"])
            hidden = self._embed(graph, ids)
            if self.model.per_layer_input:
                self._layer_inputs = write_layer_inputs(graph, self.packing, self.model, ids, hidden)
        else:
            hidden = graph.input("hidden_in", graph.numbers, ["batch", "tokens", self.model.hidden_size])
        lengths = graph.input("seqlens_k", INT32, ["batch"])
        total = graph.input("total", INT32, [])
        delta: ir.Value | None = None
        for index in range(start, stop):
            hidden, delta = self._layer(graph, index, hidden, delta, lengths, total, puts_out=index in between)
            self._done(index + 1)
        if delta is not None:
            hidden = graph.op("Add", hidden, delta, name="hidden")
        graph.output(hidden, "hidden", graph.numbers, ["batch", "tokens", self.model.hidden_size])

    def head(self, graph: Graph) -> None:
        """Write the head: from hidden states to logits, in float32 on every device."""
        model = self.model
        rows = graph.input("hidden_in", graph.numbers, ["rows", model.hidden_size])
        rows = self._norm(graph, rows, f"{model.prefix}{model.names.last_norm}")
        rows = self._scaled(graph, rows, "head.scale", model.logit_scale)
        logits = graph.linear(rows, self._head_matrix(), "head")
        if graph.numbers != FLOAT:
            logits = graph.op("Cast", logits, name="head.cast", to=FLOAT)
        if model.logit_softcap:
            cap = graph.constant("head.softcap", model.logit_softcap, FLOAT)
            capped = graph.op("Tanh", graph.op("Div", logits, cap, name="head.scaled"), name="head.tanh")
            logits = graph.op("Mul", capped, cap, name="head.capped")
        graph.output(logits, "logits", FLOAT, ["rows", model.vocab_size])

    def _embed(self, graph: Graph, ids: ir.Value) -> ir.Value:
        model, table = self.model, self.packing.table(f"{self.model.prefix}embed_tokens")
        self._table = table
        return self._scaled(graph, graph.lookup(table, ids, "embedding"), "embedding.scale", model.embedding_scale)

    def _head_matrix(self) -> PackedMatrix:
        if not self.model.tied:
            return self.packing.matrix(self.model.head)
        assert self._table is not None, "the body is written before the head"
        return self.packing.head_of(self._table, f"{self.model.prefix}embed_tokens")

    def _layer(
        self,
        graph: Graph,
        index: int,
        hidden: ir.Value,
        delta: ir.Value | None,
        lengths: ir.Value,
        total: ir.Value,
        puts_out: bool,
    ) -> tuple[ir.Value, ir.Value | None]:
        """Write one layer; return the residual stream and the layer's output, not yet added; None where it is added.

        `puts_out`: make the residual stream before the layer an output of the graph.
        """
        model, name = self.model, f"{self.model.prefix}layers.{index}"
        before_attention, after_attention, before_feed, after_feed = model.layer_norms()
        x, hidden = self._enter(graph, hidden, delta, name, before_attention)
        if puts_out:
            graph.output(hidden, hidden_name(index), graph.numbers, ["batch", "tokens", model.hidden_size])
        layer = model.layers[index]
        if layer.delta_rule:
            x = write_delta_rule(graph, self.packing, model, index, layer.delta_rule, x)
        elif layer.conv_taps:
            x = write_convolution(graph, self.packing, model, index, layer.conv_taps, x)
        else:
            x = self._attention(graph, index, layer, x, lengths, total)
        x = self._leave(graph, x, f"{name}.self_attn", name, after_attention)
        x, hidden = self._enter(graph, hidden, x, name, before_feed)
        if layer.experts and model.experts:
            fed = write_experts(graph, self.packing, model.experts, name, x)
        else:
            fed = self._feed_forward(graph, name, x)
        fed = self._leave(graph, fed, f"{name}.mlp", name, after_feed)
        if not model.layer_scalars:
            return hidden, fed
        hidden = graph.op("Add", hidden, fed, name=f"{name}.mlp.added")
        if self._layer_inputs:
            hidden = add_own_input(graph, self.packing, model, index, hidden, self._layer_inputs[index])
        factor = graph.stored(f"{name}.layer_scalar", graph.numbers, [1], self.packing.vector(f"{name}.layer_scalar"))
        return graph.op("Mul", hidden, factor, name=f"{name}.scaled"), None

    def _enter(
        self, graph: Graph, hidden: ir.Value, delta: ir.Value | None, layer: str, norm: str | None
    ) -> tuple[ir.Value, ir.Value]:
        """Add `delta` to the residual stream; return the normalised input of the layer's next part, and the stream."""
        if norm is not None and delta is not None:
            return self._add_norm(graph, hidden, delta, f"{layer}.{norm}")
        if delta is not None:
            hidden = graph.op("Add", hidden, delta, name=f"{delta.name}.added")
        return hidden if norm is None else self._norm(graph, hidden, f"{layer}.{norm}"), hidden

    def _leave(self, graph: Graph, x: ir.Value, part: str, layer: str, norm: str | None) -> ir.Value:
        """Return the output of a layer's part, normalised and scaled for the residual stream."""
        x = x if norm is None else self._norm(graph, x, f"{layer}.{norm}")
        return self._scaled(graph, x, f"{part}.scaled", self.model.residual_scale, "residual.scale")

    def _attention(
        self, graph: Graph, index: int, layer: Layer, x: ir.Value, lengths: ir.Value, total: ir.Value
    ) -> ir.Value:
        model, parent = self.model, f"{self.model.prefix}layers.{index}"
        name = f"{parent}.self_attn"
        shape: GraphShape = ["batch", layer.kv_heads, "capacity", layer.head_dim]
        owner = model.kv_owner(index)
        past = [graph.input(f"past.{owner}.{kind}", self.cache, shape) for kind in ("key", "value")]
        *queries, gate = self._queries(graph, parent, layer, x)
        rotary = self._rotary(graph, layer)
        if model.norms_after_rope:
            queries[:2] = write_late_norms(graph, self.packing, model, index, queries, rotary, x, lengths)
            rotary = ()
        optional: dict[str, Any] = {"scale": model.attention_scale, "do_rotary": int(bool(rotary))}
        if layer.window is not None:
            optional["local_window_size"] = layer.window
        if model.attention_softcap:
            optional["softcap"] = model.attention_softcap
        if layer.rope is not None and model.ropes[layer.rope].interleaved:
            optional["rotary_interleaved"] = 1
        inputs: list[ir.Value | None] = [*queries, *past, lengths, total, *rotary]
        if model.attention_sinks:
            place = self.packing.vector(f"{name}.sinks")
            sinks = graph.stored(f"{name}.sinks", graph.numbers, [model.heads], place)
            inputs += [*[None] * (SINKS - len(inputs)), sinks]
        output, key, value = graph.ops(
            "GroupQueryAttention", *inputs,
            outputs=3, domain=MICROSOFT, name=name, num_heads=model.heads, kv_num_heads=layer.kv_heads, **optional,
        )  # fmt: skip
        graph.output(key, f"present.{index}.key", self.cache, shape)
        graph.output(value, f"present.{index}.value", self.cache, shape)
        if gate is not None:
            share = graph.op("Sigmoid", gate, name=f"{name}.share")
            output = graph.op("Mul", output, share, name=f"{name}.gated")
        return self._linear(graph, output, f"{parent}.{model.names.output}", model.output_bias)

    def _queries(self, graph: Graph, layer_name: str, layer: Layer, x: ir.Value) -> tuple[ir.Value | None, ...]:
        """Return query, key, value and gate. The first has all three joined unless a norm or gate needs them apart."""
        model, name = self.model, f"{layer_name}.self_attn"
        modules = [f"{name}.{kind}_proj" for kind in "qkv"]
        if model.fused_qkv:
            return self._linear(graph, x, f"{name}.qkv_proj", model.qkv_bias), None, None, None
        if not layer.stores_kv:
            query = self._linear(graph, x, modules[0], model.qkv_bias)
            if model.qk_norm:
                query = self._head_norm(
                    graph, query, f"{layer_name}.{model.names.query_norm}", layer.head_dim, model.heads
                )
            none = self._no_tokens(graph, query, name, layer)
            return query, none, none, None
        if not (model.qk_norm or model.attention_gate) and self.packing.can_join(*modules):
            bias = self.packing.joined_vectors([f"{module}.bias" for module in modules]) if model.qkv_bias else None
            return graph.linear(x, self.packing.matrix(*modules), f"{name}.qkv_proj", bias), None, None, None
        query, key = (self._linear(graph, x, module, model.qkv_bias) for module in modules[:2])
        value = self._linear(graph, x, modules[2], model.qkv_bias) if layer.has_values else key
        if model.value_norm:
            value = self._head_norm(graph, value, f"{name}.v_norm", layer.head_dim, layer.kv_heads, weighted=False)
        gate: ir.Value | None = None
        if model.attention_gate:
            query, gate = self._without_gate(graph, query, name, layer.head_dim)
        if model.qk_norm:
            weighted = not model.norms_after_rope
            query, key = (
                self._norm(graph, part, f"{layer_name}.{norm}")
                if model.qk_norm_span == "layer"
                else self._head_norm(graph, part, f"{layer_name}.{norm}", layer.head_dim, heads, weighted=weighted)
                for part, norm, heads in (
                    (query, model.names.query_norm, model.heads),
                    (key, model.names.key_norm, layer.kv_heads),
                )
            )
        return query, key, value, gate

    def _no_tokens(self, graph: Graph, query: ir.Value, name: str, layer: Layer) -> ir.Value:
        """Write keys (or values) of no tokens, with which attention reads the cache and adds nothing to it."""
        width = layer.kv_heads * layer.head_dim
        ends = graph.constant(f"none.{width}", [0, width], INT64)
        starts, axes = graph.constant("none.starts", [0, 0], INT64), graph.constant("none.axes", [1, 2], INT64)
        return graph.op("Slice", query, starts, ends, axes, name=f"{name}.none")

    def _without_gate(self, graph: Graph, x: ir.Value, name: str, head_dim: int) -> tuple[ir.Value, ir.Value]:
        """Split the queries from the gates, which are interleaved head by head."""
        heads = self.model.heads
        split = graph.constant(f"heads.{heads}.gated", [0, -1, heads, 2 * head_dim], INT64)
        joined = graph.constant(f"joined.{heads * head_dim}", [0, -1, heads * head_dim], INT64)
        by_head = graph.op("Reshape", x, split, name=f"{name}.by_head")
        parts = graph.ops("Split", by_head, outputs=2, name=f"{name}.query_gate", axis=-1, num_outputs=2)
        query, gate = (graph.op("Reshape", part, joined, name=f"{part.name}.joined") for part in parts)
        return query, gate

    def _head_norm(
        self, graph: Graph, x: ir.Value, name: str, head_dim: int, heads: int, *, weighted: bool = True
    ) -> ir.Value:
        """Write a norm over each head, because the CPU's attention operator has none."""
        split = graph.constant(f"heads.{heads}.{head_dim}", [0, -1, heads, head_dim], INT64)
        joined = graph.constant(f"joined.{heads * head_dim}", [0, -1, heads * head_dim], INT64)
        x = graph.op("Reshape", x, split, name=f"{name}.split")
        weight = self._norm_weight(graph, name) if weighted else self._ones(graph, head_dim)
        x = graph.norm(x, weight, self.model.norm_epsilon, name)
        return graph.op("Reshape", x, joined, name=f"{name}.joined")

    def _ones(self, graph: Graph, count: int) -> ir.Value:
        """Return the weights of a norm that has none."""
        if count not in self._places_of_ones:
            self._places_of_ones[count] = self.packing.floats(np.ones(count, np.float32))
        return graph.stored(f"ones.{count}", graph.numbers, [count], self._places_of_ones[count])

    def _rotary(self, graph: Graph, layer: Layer) -> tuple[ir.Value, ...]:
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

    def _feed_forward(self, graph: Graph, layer: str, x: ir.Value) -> ir.Value:
        model, names, name = self.model, self.model.names, f"{layer}.mlp"
        if model.fused_gate_up:
            both, width = self.packing.matrix(f"{name}.gate_up_proj"), model.intermediate_size
            gate = graph.linear(x, both.rows(0, width), f"{name}.gate_proj")
            up = graph.linear(x, both.rows(width, 2 * width), f"{name}.up_proj")
        else:
            gate = self._linear(graph, x, f"{layer}.{names.gate}", model.mlp_bias)
            up = self._linear(graph, x, f"{layer}.{names.up}", model.mlp_bias)
        x = graph.op("Mul", graph.activation(gate, model.activation, f"{name}.activation"), up, name=f"{name}.gated")
        return self._linear(graph, x, f"{layer}.{names.down}", model.mlp_bias)

    def _linear(self, graph: Graph, x: ir.Value, module: str, has_bias: bool) -> ir.Value:
        bias = self.packing.vector(f"{module}.bias") if has_bias else None
        return graph.linear(x, self.packing.matrix(module), module, bias)

    def _scaled(self, graph: Graph, x: ir.Value, name: str, scale: float, constant: str | None = None) -> ir.Value:
        if scale == 1.0:
            return x
        return graph.op("Mul", x, graph.constant(constant or f"{name}.factor", scale), name=name)

    def _norm(self, graph: Graph, x: ir.Value, name: str) -> ir.Value:
        return graph.norm(x, self._norm_weight(graph, name), self.model.norm_epsilon, name)

    def _add_norm(self, graph: Graph, x: ir.Value, y: ir.Value, name: str) -> tuple[ir.Value, ir.Value]:
        return graph.add_norm(x, y, self._norm_weight(graph, name), self.model.norm_epsilon, name)

    def _norm_weight(self, graph: Graph, name: str) -> ir.Value:
        place = self.packing.vector(f"{name}.weight", add=1.0 if self.model.norm_offset else 0.0)
        return graph.stored(f"{name}.weight", graph.numbers, [place.length // self.packing.numbers.itemsize], place)
