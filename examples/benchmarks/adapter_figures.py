"""Measures the cost of LoRA adapters on ONNX Runtime: a step with and without, alone and in a batch, and memory.

    python -m examples.benchmarks.adapter_figures ARTIFACT [-o docs/data/adapters.json]

ARTIFACT is exported with `--adapter-rank 16` (or more) and `--sequences 4`. Adapters are random:
only time and memory count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

from edgekit import plugins
from edgekit.artifact.artifact import open_artifact
from edgekit.common.footprint import footprint
from edgekit.contracts.engine import Chunk, Engine
from edgekit.contracts.plan import Plan
from edgekit.testing import write_adapter

PAST, STEPS, ROUNDS = 64, 60, 9


def step_ms(engine: Engine, plan: Plan, adapters: list[str | None]) -> float:
    """The median time of one call that appends a token to a state of each adapter."""
    states = [engine.start(plan.storage.model_copy(update={"adapter": name})) for name in adapters]
    for state in states:
        engine.forward([Chunk(state, [5] * PAST, 0)])
    took = []
    for _ in range(STEPS):
        began = perf_counter()
        engine.forward([Chunk(state, [7], 1) for state in states])
        took.append(perf_counter() - began)
    for state in states:
        state.close()
    return statistics.median(took) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/data/adapters.json"))
    asked = parser.parse_args()
    artifact = open_artifact(asked.artifact)
    plan, target = artifact.plan, plugins.load_target(artifact.plan.target)
    engine = target.open(plan, artifact.folder)
    with tempfile.TemporaryDirectory() as place:
        attention = write_adapter(
            Path(place, "qv"),
            plan.model,
            rank=16,
            only=lambda module: module.endswith(("q_proj", "v_proj", "qkv_proj")),
        )
        every = [write_adapter(Path(place, str(seed)), plan.model, rank=16, seed=seed) for seed in (1, 2)]
        before_loading = [step_ms(engine, plan, [None]) for _ in range(ROUNDS)]
        empty = footprint()
        taken = {"every": engine.load_adapter("every", every[0])}
        one = footprint()
        taken["other"] = engine.load_adapter("other", every[1])
        taken["qv"] = engine.load_adapter("qv", attention)
    cases: dict[str, list[str | None]] = {
        "base": [None],
        "rank 16 on queries and values": ["qv"],
        "rank 16 on every linear": ["every"],
        "four of the base": [None] * 4,
        "four of one adapter": ["every"] * 4,
        "two of each of two adapters": ["every", "every", "other", "other"],
        "one of each: base and three adapters": [None, "every", "other", "qv"],
    }
    rounds = [{name: step_ms(engine, plan, adapters) for name, adapters in cases.items()} for _ in range(ROUNDS)]
    engine.close()
    figures = {
        "artifact": {"model": plan.model.name, "recipe": plan.recipe.name, "threads": plan.threads, "past": PAST},
        "load_average": os.getloadavg()[0],
        "base_before_any_adapter_ms": statistics.median(before_loading),
        "step_ms": {name: statistics.median(each[name] for each in rounds) for name in cases},
        "adapter_bytes": taken,
        "first_adapter_anonymous_bytes": _less(one.anonymous_bytes, empty.anonymous_bytes),
    }
    asked.output.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


def _less(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


if __name__ == "__main__":
    main()
