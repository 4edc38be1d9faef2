"""What a cache of 8 bits costs and saves beside a wide one: memory, decode, prefill, and how far the answers move.

    python examples/narrow_cache.py ARTIFACT [--depths 512 2048 3584] [--text held_out.jsonl] [--json FILE]

Both widths run in one engine and are measured in turns, so that what else the machine does meets both. The distance
(KL of the next token) is only worth something for a model that was trained.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import edgekit
from edgekit.cache import Storage
from edgekit.interfaces import Chunk, Engine, State

TURNS, PIECE, TEXT_TOKENS = 15, 256, 1000


def speeds(engine: Engine, widths: list[int], depth: int) -> dict[str, float]:
    """Seconds of a step and of a piece of prefill behind `depth` tokens; narrow over wide."""
    piece = min(PIECE, engine.abilities.max_chunk_tokens)
    tokens = [1 + place % 2000 for place in range(depth)]
    states = {bits: filled(engine, bits, tokens, depth + piece + 1) for bits in widths}
    step: dict[int, list[float]] = {bits: [] for bits in widths}
    prefill: dict[int, list[float]] = {bits: [] for bits in widths}
    for turn in range(TURNS):
        for bits, state in states.items():
            for count, times in ((1, step[bits]), (piece, prefill[bits])):
                if count == 1 or turn < 5:
                    begun = time.perf_counter()
                    engine.forward([Chunk(state, tokens[:count], 1)])
                    times.append(time.perf_counter() - begun)
                    state.rewind(count)
    for state in states.values():
        state.close()
    wide, narrow = widths[0], widths[-1]
    found = {f"step_{bits}_bits_s": statistics.median(step[bits]) for bits in widths}
    found |= {f"prefill_{bits}_bits_s": statistics.median(prefill[bits]) for bits in widths}
    found["step_over_wide"] = statistics.median(step[narrow]) / statistics.median(step[wide])
    found["prefill_over_wide"] = statistics.median(prefill[narrow]) / statistics.median(prefill[wide])
    return found


def filled(engine: Engine, bits: int, tokens: list[int], capacity: int) -> State:
    state, most = engine.start(Storage(capacity_tokens=capacity, kv_bits=bits)), engine.abilities.max_chunk_tokens
    for start in range(0, len(tokens), most):
        engine.forward([Chunk(state, tokens[start : start + most], 0)])
    return state


def distance(engine: Engine, widths: list[int], tokens: list[int]) -> dict[str, float]:
    """KL from the wide cache's next token to the narrow one's, over texts of `TEXT_TOKENS`.

    Beside it, as a control, the wide cache in pieces of one token less: other roundings, no other bits.
    """
    losses, control, same = [], [], []
    most = engine.abilities.max_chunk_tokens
    for start in range(0, len(tokens) - TEXT_TOKENS + 1, TEXT_TOKENS):
        text = tokens[start : start + TEXT_TOKENS]
        wide, narrow = (log_chances(engine, bits, text, most) for bits in widths)
        other = log_chances(engine, widths[0], text, most - 1)
        losses.append((np.exp(wide) * (wide - narrow)).sum(-1))
        control.append((np.exp(wide) * (wide - other)).sum(-1))
        same.append(wide.argmax(-1) == narrow.argmax(-1))
    every = np.concatenate(losses)
    return {
        "tokens": float(every.size), "kl_mean": float(every.mean()), "kl_999": float(np.quantile(every, 0.999)),
        "same_top": float(np.concatenate(same).mean()), "control_kl_mean": float(np.concatenate(control).mean()),
    }  # fmt: skip


def log_chances(engine: Engine, bits: int, tokens: list[int], most: int) -> Any:
    state, rows = engine.start(Storage(capacity_tokens=len(tokens), kv_bits=bits)), []
    for start in range(0, len(tokens), most):
        part = tokens[start : start + most]
        rows.append(engine.forward([Chunk(state, part, len(part))])[0].astype(np.float64))
    state.close()
    logits = np.concatenate(rows)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--depths", type=int, nargs="*", default=[512, 2048, 3584])
    parser.add_argument("--text", type=Path, help="jsonl with a `text` on each line")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with edgekit.open(arguments.artifact, sequences=2, prefixes=0) as runtime:
        engine = runtime.engine
        widths = [engine.abilities.kv_bits[0], 8]
        sizes = [engine.state_bytes(Storage(capacity_tokens=1024, kv_bits=bits)) for bits in widths]
        found: dict[str, Any] = {"widths": widths, "bytes_over_wide": sizes[1] / sizes[0]}
        if arguments.text:
            texts = (json.loads(line)["text"] for line in arguments.text.read_text().splitlines())
            found["distance"] = distance(engine, widths, runtime.encode("\n".join(texts))[: 20 * TEXT_TOKENS])
        found["depths"] = {str(depth): speeds(engine, widths, depth) for depth in arguments.depths}
    found["load_average"] = os.getloadavg()[0]
    print(json.dumps(found, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
