"""Measures prefix reuse and batching on a real artifact; compared figures are measured in turns.

    python -m examples.benchmarks.serving_figures ARTIFACT [--prefix 384] [--suffix 32] [--sequences 8] [-o FILE]

Reuse: the time to the first token of a prompt whose beginning is kept, against feeding only its end to a state that
holds the beginning, plus the bytes that have to be copied at the speed at which this machine copies. Batching: tokens
a second of several answers together, against the engine's own step for as many states and for one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

import edgekit
from edgekit.contracts.engine import Chunk
from edgekit.runtime.memory.budget import MemoryBudget
from edgekit.runtime.prefix_cache.tree import Prefixes, PrefixKey

assert sys.platform != "win32"

TURNS = 15


class Nothing:
    """A segment without keys and values, so that only the tree's own work is timed."""

    bytes = 0

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def head(self, count: int) -> Nothing:
        return Nothing(count)

    def split(self, count: int) -> tuple[Nothing, Nothing]:
        return Nothing(count), Nothing(self.tokens - count)

    def write(self, path: Path) -> None:
        raise NotImplementedError


def tree_costs(prompts: int = 200, tokens: int = 2000) -> dict[str, float]:
    """Microseconds a token, of prompts that share beginnings of any length."""
    random = np.random.default_rng(0)
    known: list[list[int]] = []
    tree, key = Prefixes(MemoryBudget()), PrefixKey("", None, 16)
    inserting = looking = 0.0
    for _ in range(prompts):
        shared = known[random.integers(len(known))][: random.integers(tokens)] if known else []
        prompt = [*shared, *random.integers(0, 32_000, tokens - len(shared)).tolist()]
        known.append(prompt)
        begun = perf_counter()
        found = tree.num_cached(key, prompt)
        tree.insert(key, prompt, Nothing(tokens - found))
        inserting += perf_counter() - begun
        begun = perf_counter()
        tree.match(key, prompt, tokens - 1)
        looking += perf_counter() - begun
    return {
        "lookup_us_per_token": looking / prompts / tokens * 1e6,
        "insert_us_per_token": inserting / prompts / tokens * 1e6,
    }


def reuse(artifact: Path, prefix_tokens: int, suffix_tokens: int) -> dict[str, float]:
    random = np.random.default_rng(1)
    with edgekit.open(artifact, prefixes="1GiB", sequences=2) as runtime:
        vocabulary = min(runtime.engine.capabilities.vocabulary, 8000)
        prefix = random.integers(10, vocabulary, prefix_tokens).tolist()
        runtime.complete(prefix, max_tokens=1, ignore_eos=True)
        held = runtime.engine.start(runtime.kv_config)
        runtime.engine.forward([Chunk(held, prefix, 0)])
        segment = held.save(0, prefix_tokens)
        source = np.ones(segment.bytes, np.uint8)
        hits, feeding, copying = [], [], []
        for _ in range(TURNS):
            suffix = random.integers(10, vocabulary, suffix_tokens).tolist()
            before = runtime.metrics().cached_tokens
            answer = runtime.complete([*prefix, *suffix], max_tokens=1, ignore_eos=True)
            assert runtime.metrics().cached_tokens - before >= prefix_tokens
            assert answer.timings.first_token_s is not None
            hits.append(answer.timings.first_token_s)
            begun = perf_counter()
            runtime.engine.forward([Chunk(held, suffix, 1)])
            feeding.append(perf_counter() - begun)
            held.rewind(suffix_tokens)
            begun = perf_counter()
            np.empty_like(source)[:] = source
            copying.append(perf_counter() - begun)
        begun = perf_counter()
        fresh = random.integers(10, vocabulary, prefix_tokens + suffix_tokens).tolist()
        runtime.complete(fresh, max_tokens=1, ignore_eos=True)
        cold = perf_counter() - begun
        held.close()
    allowed = 1.1 * median(feeding) + median(copying) + 0.002
    return {
        "prefix_tokens": prefix_tokens,
        "suffix_tokens": suffix_tokens,
        "without_reuse_ms": cold * 1e3,
        "hit_ms": median(hits) * 1e3,
        "suffix_alone_ms": median(feeding) * 1e3,
        "copied_mb": segment.bytes / 1e6,
        "copy_ms": median(copying) * 1e3,
        "hit_over_allowed": median(hits) / allowed,
    }


def batching(artifact: Path, sequences: int, prompt_tokens: int = 64, tokens: int = 24) -> dict[str, float]:
    random = np.random.default_rng(2)
    with edgekit.open(artifact, prefixes=0, sequences=2 * sequences + 1) as runtime:
        vocabulary = min(runtime.engine.capabilities.vocabulary, 8000)
        prompts = random.integers(10, vocabulary, (sequences, prompt_tokens)).tolist()
        states = [runtime.engine.start(runtime.kv_config) for _ in range(sequences)]
        for state, prompt in zip(states, prompts, strict=True):
            runtime.engine.forward([Chunk(state, prompt, 1)])
        streams = [runtime.submit(prompt, max_tokens=tokens + 2, ignore_eos=True) for prompt in prompts]
        while not all(stream.generated_tokens for stream in streams):
            runtime.step()
        one, many, loop = [], [], []
        for turn in range(tokens - sequences):
            begun = perf_counter()
            runtime.engine.forward([Chunk(state, [turn + 10], 1) for state in states])
            many.append(perf_counter() - begun)
            for state in states:
                state.rewind(1)
            begun = perf_counter()
            runtime.engine.forward([Chunk(states[0], [turn + 10], 1)])
            one.append(perf_counter() - begun)
            states[0].rewind(1)
            before = sum(stream.generated_tokens for stream in streams)
            begun = perf_counter()
            runtime.step()
            loop.append((perf_counter() - begun) / (sum(stream.generated_tokens for stream in streams) - before))
        for state in states:
            state.close()
    return {
        "sequences": sequences,
        "one_tokens_per_s": 1 / median(one),
        "engine_tokens_per_s": sequences / median(many),
        "together_tokens_per_s": 1 / median(loop),
        "together_over_engine": median(many) / sequences / median(loop),
        "together_over_one": median(one) / median(loop),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--prefix", type=int, default=384)
    parser.add_argument("--suffix", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("-o", "--output", type=Path, help="write the figures here as JSON too")
    arguments = parser.parse_args()
    figures = {
        "load_average": os.getloadavg()[0],
        "tree": tree_costs(),
        "reuse": reuse(arguments.artifact, arguments.prefix, arguments.suffix),
        "batching": batching(arguments.artifact, arguments.sequences),
    }
    print(json.dumps(figures, indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
