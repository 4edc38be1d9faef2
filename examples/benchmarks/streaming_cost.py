"""Measures the cost of `stream` over the bare engine loop on a real artifact: both advance in turns, a token each.

    python -m examples.benchmarks.streaming_cost ARTIFACT [--tokens 400] [-o FILE]

The bare loop feeds a token, takes the largest logit and feeds that; a stream does what users get, text included. Both
stand at the same depth of the cache.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

import edgekit
from edgekit.contracts.engine import Chunk

PROMPT_TOKENS = 512


def measure(artifact: Path, tokens: int) -> dict[str, float]:
    """Medians in milliseconds, and what share of a step passes outside the engine."""
    with edgekit.open(artifact) as runtime:
        vocabulary = runtime.engine.abilities.vocabulary
        prompt = [int(token) for token in np.random.default_rng(0).integers(10, min(vocabulary, 8000), PROMPT_TOKENS)]
        state = runtime.engine.start(runtime.kv_config)
        stream = runtime.stream(prompt, max_tokens=tokens, ignore_eos=True)
        assert runtime.artifact is not None
        for _ in range(-(-PROMPT_TOKENS // runtime.artifact.plan.chunk_tokens)):
            runtime.step()
        rows = runtime.engine.forward([Chunk(state, prompt, 1)])
        bare, streamed = [], []
        before = runtime.metrics()
        for _ in range(tokens - 2):
            begun = perf_counter()
            token = int(np.argmax(rows[0][-1]))
            rows = runtime.engine.forward([Chunk(state, [token], 1)])
            middle = perf_counter()
            runtime.step()
            stream.poll()
            bare.append(middle - begun)
            streamed.append(perf_counter() - middle)
        after = runtime.metrics()
        state.close()
    host, engine = after.host_s - before.host_s, after.engine_s - before.engine_s
    return {
        "bare_ms": median(bare) * 1e3,
        "streamed_ms": median(streamed) * 1e3,
        "streamed_over_bare": median(streamed) / median(bare),
        "host_us_per_step": host / max(1, after.steps - before.steps) * 1e6,
        "host_share": host / (host + engine),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("-o", "--output", type=Path, help="write the figures here as JSON too")
    arguments = parser.parse_args()
    figures = measure(arguments.artifact, arguments.tokens)
    print(f"load average {os.getloadavg()[0]:.1f}")
    for name, value in figures.items():
        print(f"{name:<20} {value:>10.4f}")
    if arguments.output:
        arguments.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
