"""Writes the files of an artifact: the body in parts, the head, and one data file that they all point into.

The graph is a function of the plan; the weights are streamed, so memory does not grow with the model.
"""

from __future__ import annotations

from pathlib import Path

from edgekit.errors import Unsupported, vendor_errors
from edgekit.interfaces import Progress
from edgekit.plan import Plan
from edgekit.weights.neutral import NeutralWeights
from edgekit_onnx.data_file import DataFile
from edgekit_onnx.parts import CACHE_BITS, HEAD, can_build, parts_of, table_rows

# 4: activations are rounded to int8 for each product, as every fast CPU kernel does. 1: float32 products, for checks.
FAST, EXACT = 4, 1


def export(plan: Plan, weights: NeutralWeights, out: Path, progress: Progress, *, accuracy_level: int = FAST) -> None:
    """Write the artifact's files into the empty directory `out`."""
    reason = can_build(plan)
    if reason:
        raise Unsupported(reason)
    with vendor_errors("onnx"):
        _write(plan, weights, out, progress, accuracy_level)


def _write(plan: Plan, weights: NeutralWeights, out: Path, progress: Progress, accuracy_level: int) -> None:
    import onnx_ir as ir

    from edgekit_onnx.decoder import Decoder
    from edgekit_onnx.graph import Graph
    from edgekit_onnx.packing import Packing

    numbers = ir.DataType.FLOAT16 if plan.backend == "cuda" else ir.DataType.FLOAT
    cache = ir.DataType.FLOAT16 if plan.storage.kv_bits == 16 else ir.DataType.FLOAT
    assert plan.storage.kv_bits in CACHE_BITS[plan.backend]
    with DataFile(out) as file:
        packing = Packing(weights, file, numbers.numpy())
        decoder = Decoder(
            plan.model, packing, positions=table_rows(plan), context=plan.context, cache=cache,
            done=lambda layer: progress(layer, len(plan.model.layers) + 1, f"layer {layer}"),
        )  # fmt: skip
        for part in parts_of(plan):
            graph = Graph(part.name, numbers, accuracy_level)
            decoder.body(graph, part.start, part.stop)
            graph.save(out)
        graph = Graph(HEAD, numbers, accuracy_level)
        decoder.head(graph)
        graph.save(out)
    weights.release()
    progress(1, 1, "exported")
