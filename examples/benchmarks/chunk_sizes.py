"""Times the first token of a long prompt that is read in chunks of several sizes, and predicts what each size takes.

    python -m examples.benchmarks.chunk_sizes ARTIFACT [--tokens 8192] [--chunks 256 512 1024] [--json FILE]

All sizes run in one engine. They take turns after every piece of the largest size, so that what else the machine does
meets all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from edgekit.artifact.artifact import open_artifact
from edgekit.common.files import write_output
from edgekit.contracts.engine import Chunk, Engine
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.planner.memory import activation_bytes


def seconds(engine: Engine, storage: KVCacheConfig, tokens: int, chunks: list[int]) -> dict[int, float]:
    """Return the seconds of reading `tokens` in chunks of each size, with the logits of the last token."""
    text = [1 + place % 2000 for place in range(tokens)]
    states, taken = {size: engine.start(storage) for size in chunks}, dict.fromkeys(chunks, 0.0)
    turn = max(chunks)
    for start in range(0, tokens, turn):
        for size, state in states.items():
            begun = time.perf_counter()
            for place in range(start, min(start + turn, tokens), size):
                piece = text[place : min(place + size, start + turn, tokens)]
                engine.forward([Chunk(state, piece, int(place + len(piece) == tokens))])
            taken[size] += time.perf_counter() - begun
    for state in states.values():
        state.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    artifact = open_artifact(given.artifact)
    changed = {"chunk_tokens": max(given.chunks), "sequences": len(given.chunks)}
    storage = artifact.plan.storage.model_copy(update={"capacity_tokens": given.tokens})
    plan = artifact.plan.model_copy(update={**changed, "storage": storage})
    engine: Engine = artifact.working_target().open(plan, artifact.folder)
    taken = seconds(engine, storage, given.tokens, sorted(given.chunks))
    engine.close()
    best = min(taken.values())
    rows: list[dict[str, Any]] = [
        {
            "chunk": size,
            "first_token_s": spent,
            "over_best": spent / best,
            "activation_bytes": activation_bytes(plan.model, size, 1, plan.memory),
        }
        for size, spent in taken.items()
    ]
    for row in rows:
        print(json.dumps(row), flush=True)
    if given.json:
        found = {"artifact": given.artifact.stem, "tokens": given.tokens, "load_average": os.getloadavg()[0]}
        write_output(given.json, (json.dumps({**found, "rows": rows}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
