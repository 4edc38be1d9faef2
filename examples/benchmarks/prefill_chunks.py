"""Measures how soon a long prompt is read, and the memory that takes, by the size of its chunks.

    edgekit export smollm2.gguf --device this --target onnx --context 8192 --threads 1 -o smollm2.edgekit
    python -m examples.benchmarks.prefill_chunks smollm2.edgekit [--tokens 8000] [--chunks 128 256 512 1024 2048] \\
        [--rounds 2] [--json FILE]

Sizes take turns, each in a process of its own. Beside other work compare processor time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from edgekit.artifact.artifact import open_artifact
from edgekit.common.files import write_output
from edgekit.common.footprint import footprint
from edgekit.contracts.feeding import feed
from edgekit.runtime.generation.tokenizer import read_codec

HELD_OUT = Path(__file__).parent / "held_out"


def read(place: Path, tokens: int, chunk: int) -> dict[str, Any]:
    """Read a prompt in chunks of one size, with an engine that was planned for them."""
    artifact = open_artifact(place)
    plan = artifact.plan.model_copy(update={"chunk_tokens": chunk})
    codec = read_codec(artifact.folder)
    given = (HELD_OUT / "code.txt").read_text() + (HELD_OUT / "prose.txt").read_text()
    text = codec.encode(given, add_special_tokens=False)[:tokens]
    engine = artifact.working_target().open(plan, artifact.folder)
    state = engine.start(plan.storage)
    feed(engine, state, text[:chunk], 0)  # the first call allocates
    state.rewind(state.length)
    begun, processor = time.perf_counter(), time.process_time()
    feed(engine, state, text, 1)
    return {
        "chunk": chunk, "tokens": len(text), "seconds": time.perf_counter() - begun,
        "processor_s": time.process_time() - processor, "private_bytes": footprint().anonymous_bytes,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[int, list[dict[str, Any]]] = {chunk: [] for chunk in given.chunks}
    for _ in range(given.rounds):
        for chunk in given.chunks:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                found[chunk].append(alone.submit(read, given.artifact, given.tokens, chunk).result())
            print(json.dumps(found[chunk][-1]), flush=True)
    least = min(statistics.median(each["processor_s"] for each in rows) for rows in found.values())
    planned = open_artifact(given.artifact).plan.chunk_tokens
    rows = [
        {
            **{name: statistics.median(each[name] for each in runs) for name in runs[0]},
            "over_best": statistics.median(each["processor_s"] for each in runs) / least,
            "is_planned": chunk == planned,
        }
        for chunk, runs in found.items()
    ]
    print(json.dumps(rows, indent=1))
    if given.json is not None:
        write_output(
            given.json, (json.dumps({"artifact": given.artifact.stem, "rows": rows}, indent=1) + "\n").encode()
        )


if __name__ == "__main__":
    main()
