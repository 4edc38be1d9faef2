"""Predicted memory beside MLX's own counters, class by class, for an artifact of the mlx target.

    python -m examples.benchmarks.mlx_memory ARTIFACT [--kv-bits 16]
    python -m examples.benchmarks.mlx_memory --config config.json [--recipe s4-g64]   (random weights, of one chunk)

MLX holds one copy of a recurrent part; its checkpoints are numpy's, and come with the tokens. Needs edgekit[mlx].
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from edgekit.artifact.artifact import open_artifact
from edgekit.common.units import show_bytes
from edgekit.contracts.engine import Chunk
from edgekit.contracts.recurrent import part_bytes, recurrent_shapes
from edgekit.contracts.stored_weights import by_rows_bytes, stored_weight_bytes
from edgekit.contracts.token_costs import kv_bytes
from edgekit.planner.memory import activation_bytes
from edgekit.plugins import load_target
from examples.benchmarks.random_artifacts import built


def compare(path: Path, widths: Sequence[int]) -> None:
    """Open an artifact, read a chunk and decode a token with each cache width; print a row for each class.

    `widths`: empty for all of the artifact.
    """
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
    predicted = stored_weight_bytes(plan.model, plan.recipe, plan.memory)
    predicted -= by_rows_bytes(plan.model, plan.recipe, plan.memory)
    print(f"{'weights':<22}{show_bytes(predicted):>12}{show_bytes(weights):>12}")
    tokens = [7 + index % (plan.model.vocab_size - 7) for index in range(plan.chunk_tokens)]
    for bits in widths or engine.abilities.kv_bits:
        storage = plan.storage.model_copy(update={"kv_bits": bits})
        held = mx.get_active_memory()
        state = engine.start(storage)
        cache = mx.get_active_memory() - held
        predicted = kv_bytes(plan.model, storage.capacity_tokens, bits) + part_bytes(recurrent_shapes(plan.model))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifact", type=Path, nargs="?")
    parser.add_argument("--config", type=Path, help="random weights of this config instead of an artifact")
    parser.add_argument("--recipe", default="s4-g64", help="of --config")
    parser.add_argument("--kv-bits", type=int, action="append", default=[], help="only this cache width")
    arguments = parser.parse_args()
    if (arguments.artifact is None) == (arguments.config is None):
        parser.error("give an artifact, or --config")
    with tempfile.TemporaryDirectory() as folder:
        of = arguments.config and (json.loads(arguments.config.read_text()), arguments.recipe)
        compare(arguments.artifact or built(Path(folder), 1, of, target="mlx"), arguments.kv_bits)


if __name__ == "__main__":
    main()
