"""A million tokens in one answer: memory stays flat, steps stay as quick, and sinks keep the text as good.

    python -m examples.benchmarks.endless ARTIFACT [--tokens 1000000] [--window 512] [--sinks 4] [--keep scored] \\
        [--text FOLDER] [--json FILE]

Three questions. Does anything grow while the window moves on? Is the last step as quick as the first? And what does the
model lose against reading the window anew for every block, with sinks and without?

Minutes lie between the first hundredth and the last, and a machine does not stay the same for minutes. So the last is
also measured in turns with the first hundredth of a young answer. Beside other work, compare processor time, which has
the evictions too: the mean of a token over each hundredth.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import edgekit
from edgekit.common.footprint import footprint
from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVEvictionPolicy
from examples.benchmarks.process_memory import used_bytes

SAMPLES = 200  # of memory, evenly over the answer
TURN = 200  # tokens, where two answers take turns
CHARACTERS = 8  # of text for each token to be read


def endless(runtime: edgekit.Runtime, tokens: int, prompt: str, young: Callable[[], edgekit.Runtime]) -> dict[str, Any]:
    """One answer of `tokens` tokens: memory along the way, the seconds of each step, and processor time."""
    window = runtime.policy.window or 0
    seconds = np.ones(tokens, np.float64)  # touched now, so that writing to it later takes no new memory
    places, private, heap = np.ones(SAMPLES), np.ones(SAMPLES), np.ones(SAMPLES)
    resident, samples, made = np.ones(SAMPLES), 0, 0
    hundredth = max(1, tokens // 100)
    processor, marks = np.ones(101), 0  # seconds at the start of each hundredth after the window is full
    # Twice the last hundredth: once alone, and once in turns with a young answer.
    answer = runtime.stream(prompt, max_tokens=tokens + hundredth + TURN, ignore_eos=True, temperature=1.0, seed=1)
    stream = iter(answer)
    kv: set[int] = set()
    before = begun = time.perf_counter()
    for piece in stream:
        now = time.perf_counter()
        new = len(piece.tokens)
        seconds[made : made + new] = (now - before) / max(1, new)
        before, made = now, made + new
        while marks <= 100 and made >= window + (tokens - window) * marks // 100:
            processor[marks] = time.process_time()
            marks += 1
        if samples < SAMPLES and made >= window + (tokens - window) * samples // SAMPLES:
            found = footprint()
            places[samples] = made
            private[samples], resident[samples] = found.anonymous_bytes or 0, found.rss_bytes or 0
            heap[samples] = used_bytes() or 0
            kv.add(runtime.metrics().states_bytes)
            samples += 1
            before = time.perf_counter()
        if made >= tokens:
            break
    took = time.perf_counter() - begun
    first = float(np.median(seconds[window : window + hundredth]))
    last = float(np.median(seconds[tokens - hundredth : tokens]))
    # What the first hundredth touches for the first time is no growth.
    steady = slice(max(1, samples // 100), samples)
    with young() as other:
        begins = iter(
            other.stream(prompt, max_tokens=hundredth + TURN + 2 * window, ignore_eos=True, temperature=1.0, seed=2)
        )
        for _ in range(2 * window):  # until its window is full
            next(begins)
        turns = [(_seconds(stream, TURN), _seconds(begins, TURN)) for _ in range(max(1, hundredth // TURN))]
    answer.close()  # what it evicted is counted when it ends
    old, new_born = (np.median(each, axis=0) for each in zip(*turns, strict=True))
    each_token = np.diff(processor) * 100 / (tokens - window)
    return {
        "tokens": made,
        "seconds": took,
        "evictions": runtime.metrics().evictions,
        "kv_bytes_seen": sorted(kv),
        "resident_slope_bytes_per_100k": float(np.polyfit(places[steady], resident[steady], 1)[0] * 1e5),
        "private_slope_bytes_per_100k": float(np.polyfit(places[steady], private[steady], 1)[0] * 1e5),
        "heap_slope_bytes_per_100k": float(np.polyfit(places[steady], heap[steady], 1)[0] * 1e5),
        "first_step_s": first,
        "last_step_s": last,
        "last_over_first": last / first,
        "last_over_young": old[0] / new_born[0],
        "processor_first_s": each_token[0],
        "processor_last_s": each_token[-1],
        "processor_last_over_first": each_token[-1] / each_token[0],
        "processor_last_over_young": old[1] / new_born[1],
        "processor_us": [round(value * 1e6, 1) for value in each_token[::10]],
        "resident_mb": [round(value / 1e6, 3) for value in resident[:samples:10]],
    }


def _seconds(stream: Iterator[edgekit.Piece], tokens: int) -> tuple[float, float]:
    """Return the median seconds of a token, and the mean processor time."""
    found, before, processor = [], time.perf_counter(), time.process_time()
    for _ in range(tokens):
        made = len(next(stream).tokens)
        now = time.perf_counter()
        if made:
            found.append((now - before) / made)
        before = now
    return statistics.median(found), (time.process_time() - processor) / tokens


def perplexities(runtime: edgekit.Runtime, tokens: list[int], policy: KVEvictionPolicy) -> dict[str, float]:
    """Return perplexities after the window has filled: with sinks, without, and with the window read anew."""
    window, block = policy.window or 0, policy.block
    anew = [
        loss
        for start in range(window, len(tokens) - block, block)
        for loss in losses_of(
            runtime, tokens[start - (window - block) : start + block + 1], KVEvictionPolicy(), window - block
        )
    ]
    count = len(anew)
    found = {"recomputed": math.exp(statistics.fmean(anew)), "scored_tokens": float(count)}
    for name, sinks in (("sinks", policy.sinks), ("no_sinks", 0)):
        kept = policy.model_copy(update={"sinks": sinks})
        losses = losses_of(runtime, tokens[: window + count + 1], kept, window)
        found[name] = math.exp(statistics.fmean(losses))
    return found | {
        "sinks_over_recomputed": found["sinks"] / found["recomputed"],
        "no_sinks_over_recomputed": found["no_sinks"] / found["recomputed"],
    }


def losses_of(runtime: edgekit.Runtime, tokens: list[int], policy: KVEvictionPolicy, skipped: int) -> list[float]:
    """Return the loss of every token after the first `skipped` + 1, fed under the policy."""
    engine = runtime.engine
    state = engine.start(runtime.kv_config)
    losses, fed = [], 0
    while fed < len(tokens) - 1:
        policy.make_room(state, tokens)
        room = policy.remaining_capacity(state.length)
        count = min(len(tokens) - 1 - fed, engine.capabilities.max_chunk_tokens, *([] if room is None else [room]))
        if fed < skipped:
            count = min(count, skipped - fed)
        rows = count if fed >= skipped else 0
        logits = engine.forward([Chunk(state, tokens[fed : fed + count], rows)])[0].astype(np.float64)
        for row, target in zip(logits, tokens[fed + 1 : fed + count + 1], strict=False):
            losses.append(float(np.logaddexp.reduce(row) - row[target]))
        fed += count
    state.close()
    return losses


def main() -> None:
    if sys.platform == "win32":
        raise SystemExit("the load of the machine is read on Linux and macOS alone")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--keep", help="newest, scored or a scorer")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[2] / "edgekit", help="Python that is read")
    parser.add_argument("--read-tokens", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    def opened() -> edgekit.Runtime:
        return edgekit.open(arguments.artifact, window=arguments.window, sinks=arguments.sinks, keep=arguments.keep)

    with opened() as runtime:
        text = "\n".join(path.read_text() for path in sorted(arguments.text.rglob("*.py")))
        # No more than is needed: a long text leaves much unused heap, over which later allocations spread.
        text = text[: CHARACTERS * arguments.read_tokens]
        tokens = runtime.encode(text)[: arguments.read_tokens]
        found: dict[str, Any] = {
            "window": arguments.window, "sinks": arguments.sinks, "keep": runtime.policy.keep,
            "block": runtime.policy.block,
            "load_average": os.getloadavg()[0],
            "perplexity": perplexities(runtime, tokens, runtime.policy),
        }  # fmt: skip
        print(json.dumps(found["perplexity"], indent=1), flush=True)
        found["answer"] = endless(runtime, arguments.tokens, text[:200], opened)
        found["load_average_after"] = os.getloadavg()[0]
    print(json.dumps(found, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
