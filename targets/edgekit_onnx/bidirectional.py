"""An encoder with the layers of a decoder as one ONNX graph, from token ids to normalised hidden states.

Its attention looks in both directions. Texts of one call are padded to the longest; `lengths` has the number of each
text's own tokens, and a mask for each window has what lies beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from edgekit.model import decoder
from edgekit.model.parts import Layer
from edgekit_onnx.decoder import INT32, INT64, OnnxDecoder, OnnxOps
from edgekit_onnx.encoder_graph import write_dense
from edgekit_onnx.graph import MICROSOFT, Graph
from edgekit_onnx.layout import MASKED, window_masks


class OnnxBidirectional(OnnxDecoder):
    """Writes the layers of a decoder with attention in both directions."""

    def write(self, graph: Graph) -> None:
        model = self.model
        hidden = self.embed(graph, graph.input("input_ids", INT64, ["batch", "tokens"]))
        lengths = graph.input("lengths", INT32, ["batch"])
        for name in window_masks(model):
            graph.input(name, graph.numbers, [1, 1, "tokens", "tokens"])
        delta: ir.Value | None = None
        for index in range(len(model.layers)):
            ops = _BidirectionalOps(self, graph, index, lengths)
            hidden, delta = decoder.layer(model, index, ops, hidden, delta)
            self.done(index + 1)
        last = OnnxOps(self, graph)
        hidden = last.norm(hidden if delta is None else last.add(hidden, delta), model.names.last_norm)
        hidden = write_dense(graph, self.packing, model, hidden)
        graph.output(hidden, "hidden", graph.numbers, ["batch", "tokens", model.vector_size])


class _BidirectionalOps(OnnxOps):
    """The operations of a layer that attends to the whole text, or to a window around each token."""

    def products(self, x: ir.Value, parts: Sequence[decoder.Projection], *, may_join: bool = False) -> list[ir.Value]:
        return super().products(x, parts)

    def attend(self, parts: Sequence[ir.Value], late_norms: Sequence[str]) -> ir.Value:
        model, layer, graph, name = self._model, self._layer, self._graph, f"{self._parent}self_attn"
        query, key, value = parts
        if rotary := self._owner.rotary(graph, layer):
            first = graph.constant("first_position", [0], INT64)
            query, key = (
                graph.op(
                    "RotaryEmbedding", part, first, *rotary, domain=MICROSOFT, name=f"{name}.{which}.rotated",
                    num_heads=heads,
                )
                for part, which, heads in ((query, "query", model.heads), (key, "key", layer.kv_heads))
            )  # fmt: skip
        key, value = (
            self._for_each_head(graph, part, layer, f"{name}.{which}")
            for part, which in ((key, "key"), (value, "value"))
        )
        mask = None if layer.window is None else graph.input(f"mask.{layer.window}", graph.numbers, [])
        return graph.op(
            "MultiHeadAttention", query, key, value, None, self._lengths, mask, domain=MICROSOFT, name=name,
            num_heads=model.heads, scale=model.attention_scale, mask_filter_value=MASKED,
        )  # fmt: skip

    def _for_each_head(self, graph: Graph, x: ir.Value, layer: Layer, name: str) -> ir.Value:
        """Repeat keys or values [batch, tokens, width] for each head of queries, which the operator wants."""
        heads, shared, width = self._model.heads, layer.kv_heads, layer.head_dim
        if heads == shared:
            return x
        split = graph.constant(f"heads.{shared}.{width}.apart", [0, -1, shared, 1, width], INT64)
        joined = graph.constant(f"joined.{heads * width}", [0, -1, heads * width], INT64)
        by_head = graph.op("Reshape", x, split, name=f"{name}.by_head")
        repeated = graph.op("Concat", *([by_head] * (heads // shared)), name=f"{name}.repeated", axis=3)
        return graph.op("Reshape", repeated, joined, name=f"{name}.for_each_head")
