"""Measures how far log-probabilities move when a prompt continues from a cached prefix instead of being read at once.

    python -m examples.benchmarks.prefix_rounding ARTIFACT [--prompts 20]

Each prompt's beginning (all of it, all but one token, or any part) is asked before the prompt itself.
"""

from __future__ import annotations

import argparse
import json
import random
from importlib.resources import files
from pathlib import Path

import edgekit

CONTEXT, ANSWERED = 512, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--prompts", type=int, default=20)
    asked = parser.parse_args()
    for exact in (False, True):
        differences, other_texts = measured(asked.artifact, asked.prompts, exact)
        found = sorted(differences)
        middle, most, last = (found[int(share * (len(found) - 1))] for share in (0.5, 0.95, 1.0))
        print(
            f"{'exact' if exact else 'default'}: {len(found)} tokens, differences in nats: median {middle:.4f}, "
            f"95 % below {most:.4f}, largest {last:.4f}; {other_texts} of {asked.prompts} greedy texts differ"
        )


def measured(artifact: Path, prompts: int, exact: bool) -> tuple[list[float], int]:
    """Return the differences of log-probabilities of equal tokens, and how many answers chose another token."""
    drawn, differences, others = random.Random(0), [], 0
    lines = (files("edgekit") / "_demo" / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    with (
        edgekit.open(artifact, context=CONTEXT, exact=exact, prefixes="64MiB") as kept,
        edgekit.open(artifact, context=CONTEXT, exact=exact, prefixes=0) as whole,
    ):
        tokens = [token for line in lines for token in kept.encode(json.loads(line)["text"])]
        for _ in range(prompts):
            size, start = drawn.randrange(40, 250), drawn.randrange(len(tokens) - 250)
            prompt = tokens[start : start + size]
            kept.complete(prompt[: drawn.choice([size, size - 1, drawn.randrange(8, size)])], max_tokens=1)
            first, second = (each.complete(prompt, max_tokens=ANSWERED, logprobs=1) for each in (kept, whole))
            assert first.timings.cached_tokens and not second.timings.cached_tokens
            for one, other in zip(first.logprobs, second.logprobs, strict=False):
                if one.token != other.token:
                    others += 1
                    break
                differences.append(abs(one.logprob - other.logprob))
    return differences, others


if __name__ == "__main__":
    main()
