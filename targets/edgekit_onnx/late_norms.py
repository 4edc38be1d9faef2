"""Norms after the rope (Hunyuan): queries and keys are rotated by an operator of their own, before attention.

Both come normalised, but not weighted, since rotating keeps their mean square. The weights of both norms scale the
queries, so that evictions can rotate cached keys further.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from edgekit.model.spec import ModelSpec
from edgekit_onnx.graph import MICROSOFT, Graph
from edgekit_onnx.packing import OnnxPacking

INT64 = ir.DataType.INT64


def write_late_norms(
    graph: Graph,
    packing: OnnxPacking,
    model: ModelSpec,
    index: int,
    parts: Sequence[ir.Value],
    rotary: tuple[ir.Value, ...],
    lengths: ir.Value,
) -> list[ir.Value]:
    """Write the rotation of normalised queries and keys [batch, tokens, width], and the weights of both norms."""
    layer, name = model.layers[index], f"{model.prefix}layers.{index}"
    query, key = parts[:2]
    if layer.rope is not None:
        rope = model.ropes[layer.rope]
        positions = graph.shared("positions", lambda: _positions(graph, parts[0], lengths))
        query, key = (
            graph.op(
                "RotaryEmbedding", part, positions, *rotary, domain=MICROSOFT, name=f"{name}.{which}.rotated",
                num_heads=heads, interleaved=int(rope.interleaved),
            )
            for part, which, heads in ((query, "query", model.heads), (key, "key", layer.kv_heads))
        )  # fmt: skip
    width = model.heads * layer.head_dim
    split = graph.constant(f"heads.{model.heads}.{layer.head_dim}", [0, -1, model.heads, layer.head_dim], INT64)
    query = graph.op("Reshape", query, split, name=f"{name}.query.by_head")
    for norm in (model.names.query_norm, model.names.key_norm):
        place = packing.vector(f"{name}.{norm}.weight")
        weight = graph.stored(f"{name}.{norm}.weight", graph.numbers, [layer.head_dim], place)
        query = graph.op("Mul", query, weight, name=f"{name}.{norm}.weighted")
    joined = graph.constant(f"joined.{width}", [0, -1, width], INT64)
    return [graph.op("Reshape", query, joined, name=f"{name}.query.joined"), key]


def _positions(graph: Graph, x: ir.Value, lengths: ir.Value) -> ir.Value:
    """Write the position of each token [batch, tokens]: `lengths` is the position of the last one."""
    zero, one = graph.constant("number.0", 0, INT64), graph.constant("number.1", 1, INT64)
    last = graph.op("Cast", lengths, name="positions.last", to=INT64)
    ends = graph.op("Unsqueeze", last, graph.constant("axis.1", [1], INT64), name="positions.ends")
    count = graph.op("Gather", graph.op("Shape", x, name="positions.shape"), one, name="positions.count", axis=0)
    first = graph.op("Sub", ends, graph.op("Sub", count, one, name="positions.back"), name="positions.first")
    steps = graph.op("Range", zero, count, one, name="positions.steps")
    return graph.op("Add", first, steps, name="positions.of_tokens")
