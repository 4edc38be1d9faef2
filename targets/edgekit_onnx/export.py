"""Writes the files of an artifact: the body in parts, the head, and one data file that they all point into.

The graph is a function of the plan; the weights are streamed, so memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgekit.errors import Unsupported, vendor_errors
from edgekit.interfaces import Chunk, Progress
from edgekit.plan import Plan
from edgekit.weights.neutral import NeutralWeights
from edgekit_onnx.data_file import DataFile
from edgekit_onnx.narrow import Reach, Steps, typical_tokens, write_steps
from edgekit_onnx.parts import CACHE_BITS, HEAD, can_build, parts_of, table_rows
from edgekit_onnx.slab import KEY, VALUE

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
    if plan.backend == "cpu":
        progress(0, 1, "steps of an 8-bit cache")
        write_steps(out, cache_steps(plan, out, typical_tokens(plan.model, weights)))
    weights.release()
    progress(1, 1, "exported")


def cache_steps(plan: Plan, files: Path, sequences: Sequence[Sequence[int]]) -> Steps:
    """The steps that fit these tokens, by the graphs as they were written; no weight is copied for it."""
    from edgekit_onnx.engine import OnnxEngine

    reach = Reach(plan.model, plan.context)
    engine = OnnxEngine(plan, files, packs=False)
    try:
        storage = plan.storage.model_copy(update={"kv_bits": engine.abilities.kv_bits[0]})
        for tokens in sequences:
            state, count = engine.start(storage), min(len(tokens), storage.capacity_tokens)
            for start in range(0, count, plan.chunk_tokens):
                engine.forward([Chunk(state, tokens[start : min(count, start + plan.chunk_tokens)], 0)])
            for layer in range(len(plan.model.layers)):
                keys, values = (state.slab.read(layer, kind, state.row)[:, :count] for kind in (KEY, VALUE))
                reach.look(layer, keys, values)
            state.close()
    finally:
        engine.close()
    return reach.steps()
