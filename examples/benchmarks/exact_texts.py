"""Counts the texts of exact mode that batching, drafting and chunking change; there must be none.

    python -m examples.benchmarks.exact_texts ARTIFACT [--window 64] [--keep scored] [--prompts 200] \\
        [--prompt-tokens 12 84] [--answer-tokens 32] [--ways batch replay] [--json FILE]

Each prompt is answered alone without drafts, and then together with others by each drafter; `pieces` reads prompts a
few tokens at a time, each piece after the kept prefix before it, and `restart` continues from prefixes that a closed
runtime left in a file. Tokens and the bits of their log probabilities are compared. Half of the answers are greedy,
half are sampled. With `--json` the answers given alone are kept beside the results, so that a later call for other
ways compares with them. On a machine that runs other work, use an artifact exported with `--threads 1`: two threads
that wait for each other take many times longer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

import edgekit
from edgekit.artifact.artifact import open_artifact
from edgekit.common.files import write_file
from edgekit.contracts.engine import Engine
from edgekit.contracts.kv_policy import apply_limits
from edgekit.runtime.generation.tokenizer import read_codec
from edgekit.runtime.speculation.controller import SpeculationController
from edgekit.runtime.speculation.costs import Costs
from edgekit.runtime.speculation.draft_model import DraftModel
from edgekit.runtime.speculation.drafters import DrafterFactory, Drafting
from edgekit.runtime.speculation.ngram import Corpus, Ngrams
from edgekit.runtime.speculation.speculation import Speculation
from edgekit.runtime.stream import Answer
from edgekit.testing.drafting import FixedLengthDrafting, ReplayDrafter

HELD_OUT = Path(__file__).parent / "held_out"
SEQUENCES, SINKS = 4, 4
AFTER_PREFIXES = ("pieces", "restart")
PIECE, PREFIXES = 7, "1GiB"  # tokens read at a time; a cache that drops none of them
# Drafts that cost nothing: an adapting drafter drafts as often as it can.
CHEAP = Costs({1: 1.0, 2: 1.02, 4: 1.05, 8: 1.1, 16: 1.3})
FREE = 1e-4

Given = tuple[tuple[int, ...], str]  # an answer: its tokens, and a hash of their log probabilities


class Ways:
    """The drafters by name, for one artifact. A draft model is the artifact itself in its fast mode."""

    def __init__(self, artifact: Path, limits: Limits) -> None:
        self._artifact, self._limits = open_artifact(artifact), limits
        self._codec = read_codec(self._artifact.folder)

    def drafter(self, way: str, prompts: Sequence[Sequence[int]], alone: Sequence[Given]) -> DrafterFactory | None:
        """Return the drafter of that name; `alone` are the answers that a replay proposes."""
        makers: dict[str, Callable[[], DrafterFactory | None]] = {
            "batch": lambda: None,
            "prompt-lookup": lambda: FixedLengthDrafting(self._lookup()),
            "draft-model": lambda: FixedLengthDrafting(self._draft_model()),
            "replay": lambda: _replay(prompts, alone),
            "auto": lambda: Speculation((self._lookup(), self._draft_model()), SpeculationController(CHEAP)),
        }
        return makers[way]()

    def _lookup(self) -> Ngrams:
        text = (HELD_OUT / "code.txt").read_text() + (HELD_OUT / "prose.txt").read_text()
        return Ngrams(Corpus(self._codec.encode(text, add_special_tokens=False)), tokens=6)

    def _draft_model(self) -> DraftModel:
        plan = self._artifact.plan.model_copy(update={"sequences": SEQUENCES})
        _, storage = apply_limits(plan.cache, plan.storage, **self._limits)
        engine: Engine = self._artifact.working_target().open(plan, self._artifact.folder)
        return DraftModel(
            engine, storage, CHEAP.scaled(FREE), vocabulary=plan.model.vocab_size, chunk_tokens=32, tokens=5
        )


class Limits(TypedDict):
    """The options of `edgekit.open` that decide which tokens a state keeps."""

    context: int | None
    window: int | None
    sinks: int
    keep: str | None


def limits_of(window: int | None, keep: str | None, context: int) -> Limits:
    """Return the limits of all states: a window, or a context that holds everything."""
    return Limits(context=None if window else context, window=window, sinks=SINKS if window else 0, keep=keep)


def prompts_of(artifact: Path, count: int, shortest: int, longest: int) -> list[list[int]]:
    """Return `count` prompts of `shortest` to `longest` tokens: pieces of the held-out code and prose, in turns."""
    codec = read_codec(artifact)
    texts = [
        codec.encode((HELD_OUT / name).read_text(), add_special_tokens=False) for name in ("code.txt", "prose.txt")
    ]
    prompts = []
    for number in range(count):
        text, length = texts[number % 2], shortest + number * 37 % (longest + 1 - shortest)
        start = number // 2 * 2 * len(text) // (count + 2)
        prompts.append(text[start : start + length])
    return prompts


def answers(
    artifact: Path,
    prompts: Sequence[Sequence[int]],
    *,
    limits: Limits,
    sequences: int,
    answer_tokens: int,
    drafter: DrafterFactory | None = None,
) -> Iterator[Given]:
    """Yield the answers of exact mode, those of several sequences together."""
    with edgekit.open(artifact, exact=True, sequences=sequences, prefixes=0, drafting=drafter, **limits) as runtime:
        for answer in _answered(runtime, prompts, answer_tokens):
            yield _given(answer)


def answers_after_prefixes(
    artifact: Path, prompts: Sequence[Sequence[int]], *, limits: Limits, answer_tokens: int, restarts: bool
) -> Iterator[Given]:
    """Yield the answers of exact mode to prompts that were read in pieces before, by a closed runtime if `restarts`."""

    def opened() -> edgekit.Runtime:
        return edgekit.open(artifact, exact=True, sequences=SEQUENCES, prefixes=PREFIXES, **limits)

    cached = 0
    with tempfile.TemporaryDirectory() as folder, opened() as runtime:
        for prompt in prompts:
            for stop in range(PIECE, len(prompt), PIECE):
                cached += runtime.complete(prompt[:stop], max_tokens=0).timings.cached_tokens
        if restarts:
            runtime.save_prefixes(Path(folder) / "prefixes")
            runtime.close()
            runtime, cached = opened(), 0
            runtime.load_prefixes(Path(folder) / "prefixes")
        with runtime:
            for answer in _answered(runtime, prompts, answer_tokens):
                cached += answer.timings.cached_tokens
                yield _given(answer)
    print(f"{cached} tokens came from prefixes", flush=True)


def _answered(runtime: edgekit.Runtime, prompts: Sequence[Sequence[int]], answer_tokens: int) -> Iterator[Answer]:
    streams = [
        runtime.submit(
            prompt, max_tokens=answer_tokens, ignore_eos=True, logprobs=1, seed=number,
            temperature=0.8 * (number % 4 >= 2),
        )
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip
    for stream in streams:
        yield stream.answer()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--window", type=int)
    parser.add_argument("--keep", help="newest, scored or a scorer")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[12, 84], metavar=("SHORTEST", "LONGEST"))
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument(
        "--ways", nargs="+", default=["batch", "prompt-lookup", "draft-model", "replay", "auto", *AFTER_PREFIXES]
    )
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    limits = limits_of(asked.window, asked.keep, asked.prompt_tokens[1] + asked.answer_tokens)
    prompts, begun = prompts_of(asked.artifact, asked.prompts, *asked.prompt_tokens), time.monotonic()
    given = {"limits": limits, "answer_tokens": asked.answer_tokens}
    kept = json.loads(asked.json.read_text()) if asked.json and asked.json.exists() else {}
    what = {
        "artifact": asked.artifact.name, "window": asked.window, "keep": asked.keep, "prompts": asked.prompts,
        "prompt_tokens": asked.prompt_tokens, "answer_tokens": asked.answer_tokens,
    }  # fmt: skip
    if kept.get("of") != what:
        kept = {"of": what, "alone": list(answers(asked.artifact, prompts, sequences=1, **given)), "changed": {}}
        print(f"alone: {len(prompts)} answers ({time.monotonic() - begun:.0f} s)", flush=True)
        _keep(asked.json, kept)
    expected: list[Given] = [(tuple(tokens), bits) for tokens, bits in kept["alone"]]
    ways = Ways(asked.artifact, limits)
    for way in asked.ways:
        if way in AFTER_PREFIXES:
            found = list(answers_after_prefixes(asked.artifact, prompts, restarts=way == "restart", **given))
        else:
            drafter = ways.drafter(way, prompts, expected)
            found = list(answers(asked.artifact, prompts, sequences=SEQUENCES, drafter=drafter, **given))
        changed = [number for number, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
        kept["changed"][way] = changed
        seconds = time.monotonic() - begun
        print(f"{way}: {len(changed)} of {len(found)} changed ({seconds:.0f} s) {changed[:10]}", flush=True)
        _keep(asked.json, kept)


def _keep(place: Path | None, kept: dict[str, Any]) -> None:
    if place is not None:
        write_file(place, json.dumps(kept).encode())


def _replay(prompts: Sequence[Sequence[int]], alone: Sequence[Given]) -> DrafterFactory:
    """Propose the answers given alone, with every third token wrong."""
    texts = {tuple(prompt): [*prompt, *given[0]] for prompt, given in zip(prompts, alone, strict=True)}
    return Drafting(lambda prompt: ReplayDrafter(texts[tuple(prompt)], wrong_every=3), 5)


def _given(answer: Answer) -> Given:
    bits = [float(each.logprob).hex() for each in answer.logprobs]
    return tuple(answer.tokens), hashlib.sha256(" ".join(bits).encode()).hexdigest()


if __name__ == "__main__":
    main()
