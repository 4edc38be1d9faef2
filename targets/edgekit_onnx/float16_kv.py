"""Keys and values in 16 bits: graphs derived from the exported ones, in which attention runs in float16.

With float32 queries and a float16 cache, onnxruntime would convert the whole cache at each step.
"""

from __future__ import annotations

from typing import Any

from edgekit_onnx.layout import SINKS, set_cache_type, with_nodes
from edgekit_onnx.product_kernels import DOMAIN

BITS = 16
# Tokens of a chunk that attend at once: in float16, attention holds the scores of each over the whole cache.
TOKENS_AT_ONCE = 64
# Inputs of attention that the graph has in float32: queries, keys, values, rotary tables, sinks.
_WIDE = (0, 1, 2, 7, 8, SINKS)


def halves_of(name: str) -> str:
    """Return the file name of the graph that was derived from the packed graph `name` for a float16 cache."""
    return f"half-{name}.onnx"


def with_halves(data: bytes) -> bytes:
    """Derive a graph whose cache is float16, with casts around attention."""
    import onnx
    from onnx import TensorProto

    model = onnx.ModelProto.FromString(data)
    graph = model.graph
    set_cache_type(graph, TensorProto.FLOAT16)
    nodes: list[Any] = []
    known: set[str] = set()
    for node in graph.node:
        is_foreign = node.op_type == "GroupQueryAttention" and node.domain != DOMAIN  # edgekit's reads halves itself
        nodes += _in_halves(node, known) if is_foreign else [node]
    return with_nodes(model, nodes)


def with_floats(data: bytes) -> bytes:
    """Derive a graph with a cache in float32, for packing.

    A graph with float16 cache and float32 queries would be saved with casts of the whole cache in every step.
    """
    import onnx
    from onnx import TensorProto

    model = onnx.ModelProto.FromString(data)
    set_cache_type(model.graph, TensorProto.FLOAT)
    return with_nodes(model, model.graph.node)


def _in_halves(node: Any, known: set[str]) -> list[Any]:
    """Attention between casts; `known` are inputs that were cast before, since layers share their rotary tables."""
    from onnx import TensorProto, helper

    made = []
    for place in _WIDE:
        name = node.input[place] if place < len(node.input) else ""
        if not name:
            continue
        half = f"{name}.half"
        if half not in known:
            made.append(helper.make_node("Cast", [name], [half], name=half, to=TensorProto.FLOAT16))
            known.add(half)
        node.input[place] = half
    output, node.output[0] = node.output[0], f"{node.output[0]}.half"
    wide = helper.make_node("Cast", [node.output[0]], [output], name=f"{output}.wide", to=TensorProto.FLOAT)
    return [*made, node, wide]
