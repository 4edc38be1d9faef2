"""Compare the speed of the native library with that of Python's runtime, in turns, from one artifact.

    python -m examples.benchmarks.native_speed ARTIFACT [--turns 40] [--prompt-tokens 128] [--tokens 32] [--cpu]

A turn answers one prompt with each, greedily; which of the two is first changes with every turn. The figures are the
times of Python's runtime over those of the native library: their medians, and the middle half of the turns. Both times
begin when the request is handed over. With `--cpu` they are seconds of the process's threads, for a machine that others
use: waiting does not count, spinning does. With `--same` both sides are the native library, which shows what noise
alone gives.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import edgekit
from edgekit.apps.native.library import NativeLibrary
from edgekit.apps.native.loop import find_library

DOCS = Path(__file__).parents[2] / "docs"


class Times(NamedTuple):
    """Seconds until the first token, and for a token after it."""

    first_s: float
    decode_s: float


Answers = Callable[[list[int], int], Times]


def by_cpu(answer: Answers) -> Answers:
    """Times of the process's threads: of an answer of one token, and of the further ones of a longer answer."""

    def timed(prompt: list[int], tokens: int) -> Times:
        began = time.process_time()
        answer(prompt, 1)
        first_s = time.process_time() - began
        began = time.process_time()
        answer(prompt, tokens)
        return Times(first_s, (time.process_time() - began - first_s) / (tokens - 1))

    return timed


def turns(one: Answers, other: Answers, count: int, prompts: list[list[int]], tokens: int) -> list[tuple[Times, Times]]:
    found = []
    for number in range(count):
        prompt = prompts[number % len(prompts)]
        if number % 2:
            second = other(prompt, tokens)
            found.append((one(prompt, tokens), second))
        else:
            first = one(prompt, tokens)
            found.append((first, other(prompt, tokens)))
    return found


def show(name: str, ratios: list[float]) -> None:
    low, middle, high = statistics.quantiles(ratios, n=4)
    sys.stdout.write(f"{name}: {middle:.3f}, middle half {low:.3f} to {high:.3f}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--same", action="store_true")
    options = parser.parse_args()
    model = NativeLibrary(find_library()).open(options.artifact)

    def native(prompt: list[int], tokens: int) -> Times:
        answer = model.generate(prompt, max_tokens=tokens, ignores_ends=1)
        return Times(answer.prefill_s, answer.decode_s / max(1, tokens - 1))

    def python(prompt: list[int], tokens: int) -> Times:
        timings = runtime.complete(prompt, max_tokens=tokens, ignore_eos=True, temperature=0).timings
        assert timings.first_token_s is not None
        return Times(timings.first_token_s, timings.decode_s / max(1, tokens - 1))

    text = "".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
    tokens, size = model.tokenizer.encode(text[: 200 * options.prompt_tokens]), options.prompt_tokens
    prompts = [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)]
    with edgekit.open(options.artifact, draft="off", prefixes=0) as runtime:
        sides: list[Answers] = [native if options.same else python, native]
        first, second = map(by_cpu, sides) if options.cpu else sides
        turns(first, second, 4, prompts, options.tokens)  # what is loaded or packed once is so now
        found = turns(first, second, options.turns, prompts, options.tokens)
    model.close()
    show("first token", [one.first_s / other.first_s for one, other in found])
    show("decode", [one.decode_s / other.decode_s for one, other in found])
    return 0


if __name__ == "__main__":
    sys.exit(main())
