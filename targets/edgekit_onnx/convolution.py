"""A gated short convolution (LFM2) as ONNX operators: products and sums of shifted tokens.

Each output is the same sum of products whatever the number of tokens in a call, so that results do not depend on it.
Instead of a state after every token, a graph returns that after the first `kept` tokens.
"""

from __future__ import annotations

import onnx_ir as ir

from edgekit.model.spec import ModelSpec
from edgekit_onnx.graph import Graph
from edgekit_onnx.packing import OnnxPacking

INT64, FLOAT = ir.DataType.INT64, ir.DataType.FLOAT


def write_convolution(
    graph: Graph, packing: OnnxPacking, model: ModelSpec, index: int, taps: int, x: ir.Value
) -> ir.Value:
    """Write the convolution of layer `index`; its inputs of the last tokens are the layer's recurrent part."""
    name, hidden = f"{model.prefix}layers.{index}.conv", model.hidden_size

    def linear(module: str, values: ir.Value) -> ir.Value:
        bias = packing.vector(f"{module}.bias") if model.conv_bias else None
        return graph.linear(values, packing.matrix(module), module, bias)

    before, after, inputs = graph.ops(
        "Split", linear(f"{name}.in_proj", x), outputs=3, name=f"{name}.parts", axis=-1, num_outputs=3
    )
    gated = graph.op("Mul", before, inputs, name=f"{name}.gated")
    past = graph.input(f"past.{index}.inputs", FLOAT, ["batch", taps - 1, hidden])
    seen = graph.op("Concat", past, gated, name=f"{name}.seen", axis=1)
    graph.output(_kept(graph, name, taps, seen), f"present.{index}.inputs", FLOAT, ["batch", taps - 1, hidden])
    mixed = _mixed(graph, packing, model, name, taps, seen, gated)
    return linear(f"{name}.out_proj", graph.op("Mul", after, mixed, name=f"{name}.gated_after"))


def _kept(graph: Graph, name: str, taps: int, seen: ir.Value) -> ir.Value:
    """The last inputs before the tokens that are not kept."""
    kept = graph.input("kept", INT64, [1])
    width = graph.constant(f"taps.{taps - 1}", [taps - 1], INT64)
    stop = graph.op("Add", kept, width, name=f"{name}.stop")
    return graph.op("Slice", seen, kept, stop, graph.constant("axis.1", [1], INT64), name=f"{name}.kept")


def _mixed(
    graph: Graph, packing: OnnxPacking, model: ModelSpec, name: str, taps: int, seen: ir.Value, newest: ir.Value
) -> ir.Value:
    """The sum over the last `taps` tokens, oldest first."""
    weight = packing.weights.floats(f"{name}.conv.weight").reshape(model.hidden_size, taps)
    total: ir.Value | None = None
    for tap in range(taps):
        values = newest
        if tap < taps - 1:
            first, stop = (graph.constant(f"row.{row}", [row], INT64) for row in (tap, tap + 1 - taps))
            axis = graph.constant("axis.1", [1], INT64)
            values = graph.op("Slice", seen, first, stop, axis, name=f"{name}.shifted.{tap}")
        place = packing.floats(weight[:, tap])
        factor = graph.stored(f"{name}.conv.{tap}", FLOAT, [model.hidden_size], place)
        product = graph.op("Mul", values, factor, name=f"{name}.weighted.{tap}")
        total = product if total is None else graph.op("Add", total, product, name=f"{name}.sum.{tap}")
    assert total is not None
    if model.conv_bias:
        bias = graph.stored(f"{name}.conv.bias", FLOAT, [model.hidden_size], packing.vector(f"{name}.conv.bias"))
        total = graph.op("Add", total, bias, name=f"{name}.biased")
    return total
