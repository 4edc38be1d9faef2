"""Count the prompts whose texts the native library and Python write alike, from one artifact.

    python -m examples.benchmarks.native_texts ARTIFACT [--prompts 500] [--exact] [--characters 600] [--tokens 64]
        [--answers FILE] [--beside FILE]

Each prompt is a piece of this project's files, answered greedily or sampled with a seed, some with stop strings. With
`--exact`, Python drafts and reuses prefixes, and so does the native library for three prompts of four.

`--answers` writes the answers to a file, a line of JSON each; a second call goes on where the first was stopped.
`--beside` names such a file of another processor, whose kernels round otherwise: where Python's texts part, the two
tokens are shown with their log probabilities on both.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import edgekit
from edgekit.apps.native.library import NativeLibrary, NativeModel
from edgekit.apps.native.loop import find_library

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


ALTERNATIVES = 8  # whose log probabilities are kept


class Request(NamedTuple):
    prompt: str
    options: dict[str, Any]
    way: dict[str, Any]  # in which the native library computes the same


def pieces(draw: random.Random, count: int, characters: int) -> list[str]:
    root = Path(__file__).parents[2]
    files = [path for name in FOLDERS for path in sorted((root / name).rglob("*")) if path.suffix in (".py", ".md")]
    found: list[str] = []
    while len(found) < count:
        text = draw.choice(files).read_text()
        start = draw.randrange(len(text) + 1)
        piece = text[start : start + draw.randrange(10, characters)]
        if piece:
            found.append(piece)
    return found


def asked(draw: random.Random, number: int, tokens: int) -> dict[str, Any]:
    options: dict[str, Any] = {"max_tokens": draw.randrange(8, tokens), "seed": number, "temperature": 0.0}
    if draw.random() < 0.6:
        options |= draw.choice(SAMPLED)
    if draw.random() < 0.3:
        options["stop"] = draw.sample(["\n\n", "return", "the", "é", ". "], 2)
    return options


def requests(chosen: argparse.Namespace) -> list[Request]:
    draw, ways = random.Random(2), WAYS if chosen.exact else WAYS[:1]  # the first of them do not depend on their number
    prompts = enumerate(pieces(random.Random(1), chosen.prompts, chosen.characters))
    return [Request(prompt, asked(draw, at, chosen.tokens), ways[at % len(ways)]) for at, prompt in prompts]


def answer(model: NativeModel, runtime: edgekit.Runtime, request: Request) -> dict[str, Any]:
    """The answers of both loops, and what the native one counted."""
    tokens = model.tokenizer.encode(request.prompt, add_special_tokens=True)
    native = model.generate(tokens, **request.options, **request.way)
    before = runtime.metrics().evictions
    python = runtime.generate(request.prompt, **request.options, logprobs=ALTERNATIVES)
    return {
        "request": list(request),
        "native": [native.text, list(native.tokens), native.finish_reason],
        "python": [python.text, list(python.tokens), python.finish_reason],
        "drafts accepted": native.accepted_tokens,
        "tokens reused": native.cached_tokens,
        "evictions in Python": runtime.metrics().evictions - before,
        "likeliest": [each.top for each in python.logprobs],
    }


def answers(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The answer of each request, from the file where it is there."""
    asked_for, known = requests(chosen), read(chosen.answers)
    for request, line in zip(asked_for, known, strict=False):
        if line["request"] != list(request):
            sys.exit(f"{chosen.answers}: has answers to other prompts: other files or options; remove it")
        yield line
    model = NativeLibrary(find_library()).open(chosen.artifact, exact=chosen.exact)
    drafting, prefixes = ("ngram", "16MiB") if chosen.exact else ("off", 0)
    with edgekit.open(chosen.artifact, exact=chosen.exact, draft=drafting, prefixes=prefixes) as runtime:
        for request in asked_for[len(known) :]:
            line = json.loads(json.dumps(answer(model, runtime, request)))
            if chosen.answers is not None:
                with chosen.answers.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            yield line
    model.close()


def read(path: Path | None) -> list[dict[str, Any]]:
    """The lines of a file; a last one that was not written to its end is dropped."""
    if path is None or not path.exists():
        return []
    whole, newline, rest = path.read_text().rpartition("\n")
    if rest:
        path.write_text(whole + newline)
    return [json.loads(line) for line in whole.splitlines()]


def parting(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The place of the first token that differs, or where only one of them goes on; None if they are equal."""
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(one), len(other)))


def compare(chosen: argparse.Namespace) -> Counter[str]:
    seen, beside = Counter[str](), read(chosen.beside)
    for number, line in enumerate(answers(chosen)):
        (_, options, way), native, python = line["request"], line["native"], line["python"]
        seen["equal" if native == python else "different"] += 1
        if native != python:
            place = parting(native[1], python[1])
            say(f"prompt {number} parts at token {place} of {len(python[1])}: {options} {way}")
        seen["sampled"] += options["temperature"] > 0
        seen["with stops"] += "stop" in options
        seen["tokens"] += len(native[1])
        for name in ("drafts accepted", "tokens reused", "evictions in Python"):
            seen[name] += line[name]
        if number < len(beside):
            if beside[number]["request"][:2] != line["request"][:2]:
                sys.exit(f"{chosen.beside}: has answers to other prompts")
            seen["equal on both processors"] += not show_parting(number, line, beside[number])
        if number % 50 == 49:  # an emulated processor takes an hour
            say(f"{number + 1} prompts: {dict(seen)}")
    return seen


def show_parting(number: int, here: dict[str, Any], there: dict[str, Any]) -> bool:
    """Show where Python's answers of two processors part, if they do."""
    tokens = [each["python"][1] for each in (here, there)]
    place = parting(*tokens)
    if place is None:
        return False
    pair = [each[place] if place < len(each) else None for each in tokens]  # None: its text was at an end
    sides = [
        " and ".join(f"{dict(each['likeliest'][place]).get(token, float('nan')):.3f}" for token in pair)
        for each in (here, there)
        if place < len(each["likeliest"])
    ]
    say(f"prompt {number} parts between processors at token {place}: {pair}, log probabilities {'; '.join(sides)}")
    return True


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--characters", type=int, default=600, help="of a prompt, at most")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--beside", type=Path)
    seen = compare(parser.parse_args())
    say(f"{dict(seen)}")
    return 1 if seen["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
