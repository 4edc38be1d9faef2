"""Short convolutions as ONNX operators: products and sums of shifted tokens. Also LFM2's gated form of them.

Each output is the same sum of products for any number of tokens in a call, so that results do not depend on chunks. A
graph returns only the recurrent part after the first `kept` tokens of a call.
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
    """Write the gated convolution of layer `index`."""
    name, bias = f"{model.prefix}layers.{index}.conv", model.conv_bias

    def linear(module: str, values: ir.Value) -> ir.Value:
        return graph.linear(values, packing.matrix(module), module, packing.vector(f"{module}.bias") if bias else None)

    before, after, inputs = graph.ops(
        "Split", linear(f"{name}.in_proj", x), outputs=3, name=f"{name}.parts", axis=-1, num_outputs=3
    )
    gated = graph.op("Mul", before, inputs, name=f"{name}.gated")
    mixed = convolved(graph, packing, index, f"{name}.conv", taps, gated, model.hidden_size, bias)
    return linear(f"{name}.out_proj", graph.op("Mul", after, mixed, name=f"{name}.gated_after"))


def convolved(
    graph: Graph, packing: OnnxPacking, index: int, module: str, taps: int, x: ir.Value, channels: int, bias: bool
) -> ir.Value:
    """Write the convolution of each channel over `taps` tokens; the last inputs are the recurrent part."""
    past = graph.input(f"past.{index}.inputs", FLOAT, ["batch", taps - 1, channels])
    seen = graph.op("Concat", past, x, name=f"{module}.seen", axis=1)
    kept = _kept(graph, module, taps, seen)
    graph.output(kept, f"present.{index}.inputs", FLOAT, ["batch", taps - 1, channels])
    weight = packing.weights.floats(f"{module}.weight").reshape(channels, taps)
    total: ir.Value | None = None
    for tap in range(taps):  # oldest first
        values = x
        if tap < taps - 1:
            first, stop = (graph.constant(f"row.{row}", [row], INT64) for row in (tap, tap + 1 - taps))
            axis = graph.constant("axis.1", [1], INT64)
            values = graph.op("Slice", seen, first, stop, axis, name=f"{module}.shifted.{tap}")
        factor = graph.stored(f"{module}.{tap}", FLOAT, [channels], packing.floats(weight[:, tap]))
        product = graph.op("Mul", values, factor, name=f"{module}.weighted.{tap}")
        total = product if total is None else graph.op("Add", total, product, name=f"{module}.sum.{tap}")
    assert total is not None
    if bias:
        added = graph.stored(f"{module}.bias", FLOAT, [channels], packing.vector(f"{module}.bias"))
        total = graph.op("Add", total, added, name=f"{module}.biased")
    return total


def _kept(graph: Graph, module: str, taps: int, seen: ir.Value) -> ir.Value:
    """Return the last `taps - 1` inputs of the kept tokens."""
    kept = graph.input("kept", INT64, [1])
    width = graph.constant(f"taps.{taps - 1}", [taps - 1], INT64)
    stop = graph.op("Add", kept, width, name=f"{module}.stop")
    return graph.op("Slice", seen, kept, stop, graph.constant("axis.1", [1], INT64), name=f"{module}.kept")
