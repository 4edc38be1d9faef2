"""Writes the files of an artifact: the body in parts, the head, and the data file that they point into.

The graphs depend only on the plan. Weights are streamed, so memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgekit.common.progress import Progress
from edgekit.contracts.feeding import feed
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.errors import vendor_errors
from edgekit_onnx.data_file import DataFile
from edgekit_onnx.int8_kv import KVRange, Steps, typical_tokens, write_steps
from edgekit_onnx.kv_arena import KEY, VALUE
from edgekit_onnx.layout import ENCODER, HEAD, hidden_outputs, parts_of, table_rows

# 4: activations are rounded to int8 for each product, as every fast CPU kernel does. 1: float32 products, for checks.
FAST, EXACT = 4, 1


def export(plan: Plan, weights: NeutralWeights, out: Path, progress: Progress, *, accuracy_level: int = FAST) -> None:
    """Write the artifact's files into the empty directory `out`."""
    with vendor_errors("onnx"):
        _write(plan, weights, out, progress, accuracy_level)


def _write(plan: Plan, weights: NeutralWeights, out: Path, progress: Progress, accuracy_level: int) -> None:
    import onnx_ir as ir

    from edgekit_onnx.bidirectional import OnnxBidirectional
    from edgekit_onnx.decoder import OnnxDecoder
    from edgekit_onnx.encoder_graph import OnnxEncoderGraph
    from edgekit_onnx.graph import Graph
    from edgekit_onnx.packing import OnnxPacking

    numbers = ir.DataType.FLOAT16 if plan.backend == "cuda" else ir.DataType.FLOAT
    cache = ir.DataType.FLOAT16 if plan.storage.kv_bits == 16 else ir.DataType.FLOAT

    def done(layer: int) -> None:
        progress(layer, len(plan.model.layers) + 1, f"layer {layer}")

    with DataFile(out) as file:
        packing = OnnxPacking(weights, file, numbers.numpy())
        if plan.model.encoder:
            graph = Graph(ENCODER, numbers, accuracy_level)
            if plan.model.is_bert:
                OnnxEncoderGraph(plan.model, packing, done=done).write(graph)
            else:
                rows = table_rows(plan)
                OnnxBidirectional(
                    plan.model, packing, positions=rows, context=plan.context, cache=cache, done=done
                ).write(graph)
            graph.save(out)
            weights.release()
            return
        decoder = OnnxDecoder(
            plan.model, packing, positions=table_rows(plan), context=plan.context, cache=cache,
            done=done,
        )  # fmt: skip
        for part in parts_of(plan):
            graph = Graph(part.name, numbers, accuracy_level)
            decoder.body(graph, part.start, part.stop, hidden_outputs(plan, part))
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
    """Measure the quantisation steps of an 8-bit cache by running the written graphs on `tokens`. Copies no weights."""
    from edgekit_onnx.engine import OnnxEngine

    ranges = KVRange(plan.model)
    engine = OnnxEngine(plan, files, packs=False)
    try:
        storage = plan.storage.model_copy(update={"kv_bits": engine.capabilities.kv_bits[0]})
        for tokens in sequences:
            state, count = engine.start(storage), min(len(tokens), storage.capacity_tokens)
            feed(engine, state, tokens[:count], chunk_tokens=plan.chunk_tokens)
            for layer in plan.model.storing_layers:
                keys, values = (state.arena.read(layer, kind, state.slot)[:, :count] for kind in (KEY, VALUE))
                ranges.observe(layer, keys, values)
            state.close()
    finally:
        engine.close()
    return ranges.steps()
