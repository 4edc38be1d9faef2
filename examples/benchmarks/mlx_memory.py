"""Predicted memory beside MLX's own counters, class by class, for an artifact of the mlx target.

Run: python -m examples.benchmarks.mlx_memory ARTIFACT   (needs edgekit[mlx])
"""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx

from edgekit.artifact.artifact import open_artifact
from edgekit.common.units import show_bytes
from edgekit.contracts.engine import Chunk
from edgekit.planner.memory import activation_bytes, kv_bytes
from edgekit.plugins import load_target


def main(path: Path) -> None:
    artifact = open_artifact(path)
    plan = artifact.plan
    before = mx.get_active_memory()
    engine = load_target("mlx").open(plan, path)
    for note in getattr(engine, "notes", ()):
        print(f"note: {note}")
    weights = mx.get_active_memory() - before
    on_gpu = not getattr(engine, "notes", ())
    # Where there is no GPU the engine computes in 32 bits instead of 16.
    wider = {} if on_gpu else {"activation_bits": 2 * plan.memory.activation_bits}
    facts = plan.memory.model_copy(update=wider)
    print(f"{'':<22}{'predicted':>12}{'measured':>12}")
    predicted = plan.estimate.private_weights_bytes
    print(f"{'weights':<22}{show_bytes(predicted):>12}{show_bytes(weights):>12}")
    tokens = [7 + index % (plan.model.vocab_size - 7) for index in range(plan.chunk_tokens)]
    for bits in engine.abilities.kv_bits:
        storage = plan.storage.model_copy(update={"kv_bits": bits})
        held = mx.get_active_memory()
        state = engine.start(storage)
        cache = mx.get_active_memory() - held
        predicted = kv_bytes(plan.model, storage.capacity_tokens, bits)
        print(f"{f'cache, {bits} bits':<22}{show_bytes(predicted):>12}{show_bytes(cache):>12}")
        for what, chunk in (("prefill", tokens[: storage.capacity_tokens]), ("decode", tokens[:1])):
            state.rewind(state.length)
            engine.forward([Chunk(state, chunk, 1)])
            mx.clear_cache()
            held = mx.get_active_memory()
            mx.reset_peak_memory()
            state.rewind(state.length)
            engine.forward([Chunk(state, chunk, 1)])
            peak = mx.get_peak_memory() - held
            predicted = activation_bytes(plan.model, len(chunk), 1, facts)
            print(f"{f'  {what} of {len(chunk)}':<22}{show_bytes(predicted):>12}{show_bytes(peak):>12}")
        state.close()
    engine.close()
    print(f"{'left after closing':<22}{'':>12}{show_bytes(mx.get_active_memory() - before):>12}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
