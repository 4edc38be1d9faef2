"""A BERT-like encoder as one ONNX graph, from token ids to the hidden states of the last layer, or to one logit.

Texts of one call are padded to the longest; `lengths` has the number of each text's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from edgekit.model.spec import ModelSpec
from edgekit_onnx.graph import MICROSOFT, Graph
from edgekit_onnx.packing import OnnxPacking

INT32, INT64 = ir.DataType.INT32, ir.DataType.INT64


def write_dense(graph: Graph, packing: OnnxPacking, model: ModelSpec, hidden: ir.Value) -> ir.Value:
    """Write the dense layers that follow the pooling, for each token instead: means of both are the same."""
    for dense in model.embedding.dense if model.embedding else ():
        name = f"{dense.folder}.linear"
        bias = packing.vector(f"{name}.bias") if dense.bias else None
        hidden = graph.linear(hidden, packing.matrix(name), name, bias)
    return hidden


class OnnxEncoderGraph:
    """Writes the graph of an encoder with its weights."""

    def __init__(self, model: ModelSpec, packing: OnnxPacking, *, done: Callable[[int], None]) -> None:
        self.model, self.packing, self._done = model, packing, done

    def write(self, graph: Graph) -> None:
        model = self.model
        hidden = self._embed(graph)
        lengths = graph.input("lengths", INT32, ["batch"])
        for index in range(len(model.layers)):
            name = f"{model.prefix}layers.{index}"
            x = self._attention(graph, f"{name}.self_attn", hidden, lengths)
            hidden = self._add_norm(graph, hidden, x, f"{name}.post_attention_layernorm")
            x = self._linear(graph, hidden, f"{name}.mlp.up_proj")
            x = graph.activation(x, model.activation, f"{name}.mlp.activation")
            x = self._linear(graph, x, f"{name}.mlp.down_proj")
            hidden = self._add_norm(graph, hidden, x, f"{name}.post_feedforward_layernorm")
            self._done(index + 1)
        if model.encoder and model.encoder.classifier:
            graph.output(self._classify(graph, hidden), "scores", graph.numbers, ["batch", 1])
        hidden = write_dense(graph, self.packing, model, hidden)
        graph.output(hidden, "hidden", graph.numbers, ["batch", "tokens", model.vector_size])

    def _classify(self, graph: Graph, hidden: ir.Value) -> ir.Value:
        """Write the logit of each text, from the hidden state of its first token."""
        name = f"{self.model.prefix}pooler.dense"
        first = graph.op("Gather", hidden, graph.constant("first_token", 0, INT64), name="first_state", axis=1)
        pooled = graph.op("Tanh", self._linear(graph, first, name), name="pooled")
        bias = self.packing.vector("classifier.bias")
        return graph.linear(pooled, self.packing.float_table("classifier"), "classifier", bias)

    def _embed(self, graph: Graph) -> ir.Value:
        """Write the sum of token, position and type embeddings. All tokens of a single text have the first type.

        A classifier's texts are pairs, whose second one has the second type.
        """
        model = self.model
        ids = graph.input("input_ids", INT64, ["batch", "tokens"])
        words = graph.lookup(self.packing.table(f"{model.prefix}embed_tokens"), ids, "embedding")
        places = graph.input("positions", INT64, ["tokens"])
        positions = self._float_rows(graph, f"{model.prefix}embed_positions", places)
        if model.encoder and model.encoder.classifier:
            kinds = graph.input("types", INT64, ["batch", "tokens"])
        else:
            kinds = graph.constant("first_type", [0], INT64)
        types = self._float_rows(graph, f"{model.prefix}embed_types", kinds)
        added = graph.op("Add", positions, types, name="embedding.beside")
        hidden = graph.op("Add", words, added, name="embedding.sum")
        weight, bias = self._norm_tensors(graph, f"{model.prefix}embed_norm")
        return graph.op(
            "LayerNormalization", hidden, weight, bias, name="embed_norm", epsilon=model.norm_epsilon, axis=-1
        )

    def _float_rows(self, graph: Graph, module: str, ids: ir.Value) -> ir.Value:
        return graph.lookup(self.packing.float_table(module), ids, module)

    def _attention(self, graph: Graph, name: str, x: ir.Value, lengths: ir.Value) -> ir.Value:
        query, key, value = (self._linear(graph, x, f"{name}.{kind}_proj") for kind in "qkv")
        output = graph.op(
            "MultiHeadAttention", query, key, value, None, lengths, domain=MICROSOFT, name=name,
            num_heads=self.model.heads, scale=self.model.attention_scale,
        )  # fmt: skip
        return self._linear(graph, output, f"{name}.o_proj")

    def _add_norm(self, graph: Graph, x: ir.Value, y: ir.Value, name: str) -> ir.Value:
        """Write the layer norm of `x + y`."""
        weight, bias = self._norm_tensors(graph, name)
        return graph.op(
            "SkipLayerNormalization", x, y, weight, bias,
            domain=MICROSOFT, name=name, epsilon=self.model.norm_epsilon,
        )  # fmt: skip

    def _norm_tensors(self, graph: Graph, name: str) -> tuple[ir.Value, ir.Value]:
        width = [self.model.hidden_size]
        weight, bias = (
            graph.stored(f"{name}.{kind}", graph.numbers, width, self.packing.vector(f"{name}.{kind}"))
            for kind in ("weight", "bias")
        )
        return weight, bias

    def _linear(self, graph: Graph, x: ir.Value, module: str) -> ir.Value:
        return graph.linear(x, self.packing.matrix(module), module, self.packing.vector(f"{module}.bias"))
