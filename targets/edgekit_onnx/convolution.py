"""Short convolutions as ONNX operators: products and sums of shifted tokens.

Each output is the same sum of products for any number of tokens in a call, so that results do not depend on chunks. A
graph returns only the recurrent part after the first `kept` tokens of a call.
"""

from __future__ import annotations

import onnx_ir as ir

from edgekit_onnx.data_file import DataLocation
from edgekit_onnx.graph import Graph
from edgekit_onnx.packing import OnnxPacking

INT64, FLOAT = ir.DataType.INT64, ir.DataType.FLOAT


def write_convolution(
    graph: Graph, packing: OnnxPacking, index: int, module: str, taps: int, x: ir.Value, bias: DataLocation | None
) -> ir.Value:
    """Write the convolution of each channel over `taps` tokens; the last inputs are the recurrent part."""
    weight = packing.weights.floats(f"{module}.weight").reshape(-1, taps)
    channels = len(weight)
    past = graph.input(f"past.{index}.inputs", FLOAT, ["batch", taps - 1, channels])
    seen = graph.op("Concat", past, x, name=f"{module}.seen", axis=1)
    kept = _kept(graph, module, taps, seen)
    graph.output(kept, f"present.{index}.inputs", FLOAT, ["batch", taps - 1, channels])
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
    if bias is not None:
        added = graph.stored(f"{module}.bias", FLOAT, [channels], bias)
        total = graph.op("Add", total, added, name=f"{module}.biased")
    return total


def _kept(graph: Graph, module: str, taps: int, seen: ir.Value) -> ir.Value:
    """Return the last `taps - 1` inputs of the kept tokens."""
    kept = graph.input("kept", INT64, [1])
    width = graph.constant(f"taps.{taps - 1}", [taps - 1], INT64)
    stop = graph.op("Add", kept, width, name=f"{module}.stop")
    return graph.op("Slice", seen, kept, stop, graph.constant("axis.1", [1], INT64), name=f"{module}.kept")
