"""Rotation of queries and keys by an operator of its own, where attention's operator cannot rotate them."""

from __future__ import annotations

import onnx_ir as ir

from edgekit.model.parts import Rope
from edgekit_onnx.graph import MICROSOFT, Graph

INT64 = ir.DataType.INT64


def rotates_apart(rope: Rope) -> bool:
    """Return True if attention's operator refuses to rotate so many values of a head."""
    return rope.dim % 16 != 0


def write_rotation(
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
