"""Compares narrow caches with a wide one: memory, decoding, prefill, and the change of the answers.

    python -m examples.benchmarks.narrow_cache ARTIFACT [NARROW] [--bits 8] [--depths 512 2048 3584] \\
        [--text held_out.jsonl] [--json FILE]

All widths run in one engine, or each in an artifact of its own where a target holds one width in each, and are
measured in turns, so that what else the machine does meets both. The distance (KL of the next token) is only worth
something for a model that was trained.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import edgekit
from edgekit.contracts.engine import Chunk, Engine, State
from edgekit.contracts.feeding import feed
from edgekit.contracts.kv_policy import KVCacheConfig

TURNS, PIECE, TEXT_TOKENS = 15, 256, 1000


class Way(NamedTuple):
    """An engine, and the bits that its states are asked to hold."""

    engine: Engine
    bits: int

    def start(self, tokens: int) -> State:
        return self.engine.start(KVCacheConfig(capacity_tokens=tokens, kv_bits=self.bits))

    @property
    def piece(self) -> int:
        return self.engine.abilities.max_chunk_tokens


def speeds(ways: Sequence[Way], depth: int) -> dict[str, float]:
    """Seconds of a step and of a piece of prefill behind `depth` tokens; narrow over wide."""
    piece = min(PIECE, depth, *(way.piece for way in ways))
    tokens = [1 + place % 2000 for place in range(depth)]
    states = {way.bits: (way, filled(way, tokens, depth + piece + 1)) for way in ways}
    step: dict[int, list[float]] = {way.bits: [] for way in ways}
    prefill: dict[int, list[float]] = {way.bits: [] for way in ways}
    for turn in range(TURNS):
        for bits, (way, state) in states.items():
            for count, times in ((1, step[bits]), (piece, prefill[bits])):
                if count == 1 or turn < 5:
                    begun = time.perf_counter()
                    way.engine.forward([Chunk(state, tokens[:count], 1)])
                    times.append(time.perf_counter() - begun)
                    state.rewind(count)
    for _, state in states.values():
        state.close()
    wide = ways[0].bits
    found = {f"step_{bits}_bits_s": statistics.median(times) for bits, times in step.items()}
    found |= {f"prefill_{bits}_bits_s": statistics.median(times) for bits, times in prefill.items()}
    for way in ways[1:]:
        for name, taken in (("step", step), ("prefill", prefill)):
            over = statistics.median(taken[way.bits]) / statistics.median(taken[wide])
            found[f"{name}_{way.bits}_over_{wide}"] = over
    return found


def filled(way: Way, tokens: list[int], capacity: int) -> State:
    state = way.start(capacity)
    feed(way.engine, state, tokens)
    return state


def distance(ways: Sequence[Way], tokens: list[int]) -> dict[str, float]:
    """KL from the wide cache's next token to the narrowest one's, over texts of `TEXT_TOKENS`.

    Beside it, as a control, the wide cache in pieces of one token less: other roundings, no other bits.
    """
    losses, control, same = [], [], []
    for start in range(0, len(tokens) - TEXT_TOKENS + 1, TEXT_TOKENS):
        text = tokens[start : start + TEXT_TOKENS]
        wide, narrow = (log_chances(way, text, way.piece) for way in (ways[0], ways[-1]))
        other = log_chances(ways[0], text, ways[0].piece - 1)
        losses.append((np.exp(wide) * (wide - narrow)).sum(-1))
        control.append((np.exp(wide) * (wide - other)).sum(-1))
        same.append(wide.argmax(-1) == narrow.argmax(-1))
    every = np.concatenate(losses)
    return {
        "tokens": float(every.size), "kl_mean": float(every.mean()), "kl_999": float(np.quantile(every, 0.999)),
        "same_top": float(np.concatenate(same).mean()), "control_kl_mean": float(np.concatenate(control).mean()),
    }  # fmt: skip


def log_chances(way: Way, tokens: list[int], most: int) -> Any:
    state, rows = way.start(len(tokens)), []
    for start in range(0, len(tokens), most):
        part = tokens[start : start + most]
        rows.append(way.engine.forward([Chunk(state, part, len(part))])[0].astype(np.float64))
    state.close()
    logits = np.concatenate(rows)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifacts", type=Path, nargs="+", help="one that holds all widths, or a wide and a narrow one")
    parser.add_argument("--bits", type=int, nargs="*", default=[8], help="of the narrow caches, widest first")
    parser.add_argument("--depths", type=int, nargs="*", default=[512, 2048, 3584])
    parser.add_argument("--text", type=Path, help="jsonl with a `text` on each line")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        sequences = 1 + len(arguments.bits) if len(arguments.artifacts) == 1 else 1
        runtimes = [
            stack.enter_context(edgekit.open(path, sequences=sequences, prefixes=0)) for path in arguments.artifacts
        ]
        first, last = runtimes[0].engine, runtimes[-1].engine
        ways = [Way(first, first.abilities.kv_bits[0]), *(Way(last, bits) for bits in arguments.bits)]
        sizes = [way.engine.state_bytes(KVCacheConfig(capacity_tokens=1024, kv_bits=way.bits)) for way in ways]
        found: dict[str, Any] = {
            "widths": [way.bits for way in ways],
            "bytes_over_wide": [size / sizes[0] for size in sizes[1:]],
        }
        found["files_bytes"] = [sum(file.stat().st_size for file in path.iterdir()) for path in arguments.artifacts]
        if arguments.text:
            texts = (json.loads(line)["text"] for line in arguments.text.read_text().splitlines())
            found["distance"] = distance(ways, runtimes[0].encode("\n".join(texts))[: 20 * TEXT_TOKENS])
        found["depths"] = {str(depth): speeds(ways, depth) for depth in arguments.depths}
    found["load_average"] = os.getloadavg()[0]
    print(json.dumps(found, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
