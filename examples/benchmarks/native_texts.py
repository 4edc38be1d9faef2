"""Count the prompts whose texts the native library and Python write alike, from one artifact.

    python -m examples.benchmarks.native_texts ARTIFACT [--prompts 500] [--exact]

Each prompt is a piece of this project's files, answered greedily or sampled with a seed, some with stop strings. With
`--exact`, Python drafts and reuses prefixes, and so does the native library for three prompts of four.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from edgekit_native.library import NativeLibrary, NativeModel
from edgekit_native.loop import find_library

import edgekit

FOLDERS = ("edgekit", "docs", "targets")
SAMPLED: tuple[dict[str, float], ...] = (
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 1.0, "typical_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
)
WAYS: tuple[dict[str, Any], ...] = (
    {}, {"draft_tokens": 6}, {"reuses_prefix": 1}, {"draft_tokens": 3, "reuses_prefix": 1},
)  # fmt: skip


def pieces(draw: random.Random, count: int) -> list[str]:
    root = Path(__file__).parents[2]
    files = [path for name in FOLDERS for path in sorted((root / name).rglob("*")) if path.suffix in (".py", ".md")]
    found: list[str] = []
    while len(found) < count:
        text = draw.choice(files).read_text()
        start = draw.randrange(len(text) + 1)
        piece = text[start : start + draw.randrange(10, 600)]
        if piece:
            found.append(piece)
    return found


def asked(draw: random.Random, number: int) -> dict[str, Any]:
    options: dict[str, Any] = {"max_tokens": draw.randrange(8, 64), "seed": number, "temperature": 0.0}
    if draw.random() < 0.6:
        options |= draw.choice(SAMPLED)
    if draw.random() < 0.3:
        options["stop"] = draw.sample(["\n\n", "return", "the", "é", ". "], 2)
    return options


def compare(
    model: NativeModel, runtime: edgekit.Runtime, prompts: int, ways: tuple[dict[str, Any], ...]
) -> Counter[str]:
    draw, seen = random.Random(1), Counter[str]()
    for number, prompt in enumerate(pieces(draw, prompts)):
        options, way = asked(draw, number), ways[number % len(ways)]
        tokens = model.tokenizer.encode(prompt, add_special_tokens=True)
        native, python = model.generate(tokens, **options, **way), runtime.generate(prompt, **options)
        is_equal = (native.text, native.tokens) == (python.text, python.tokens)
        is_equal = is_equal and native.finish_reason == python.finish_reason
        seen["equal" if is_equal else "different"] += 1
        if not is_equal:
            pairs = enumerate(zip(native.tokens, python.tokens, strict=False))
            place = next((at for at, (one, other) in pairs if one != other), "the end")
            sys.stdout.write(f"prompt {number} parts at token {place} of {len(python.tokens)}: {options} {way}\n")
        seen["sampled"] += options["temperature"] > 0
        seen["with stops"] += "stop" in options
        seen["tokens"] += len(native.tokens)
        seen["drafts accepted"] += native.accepted_tokens
        seen["tokens reused"] += native.cached_tokens
        if number % 50 == 49:  # an emulated processor takes an hour
            sys.stdout.write(f"{number + 1} prompts: {dict(seen)}\n")
            sys.stdout.flush()
    seen["evictions in Python"] = runtime.metrics().evictions
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--exact", action="store_true")
    options = parser.parse_args()
    model = NativeLibrary(find_library()).open(options.artifact, exact=options.exact)
    drafting, prefixes = ("ngram", "16MiB") if options.exact else ("off", 0)
    with edgekit.open(options.artifact, exact=options.exact, draft=drafting, prefixes=prefixes) as runtime:
        seen = compare(model, runtime, options.prompts, WAYS if options.exact else WAYS[:1])
    model.close()
    sys.stdout.write(f"{dict(seen)}\n")
    return 1 if seen["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
