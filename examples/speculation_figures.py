"""Measures what docs/speculation.md says, on this machine, and stores it as JSON.

    python examples/speculation_figures.py PART... --target ARTIFACT --draft ARTIFACT [--small ARTIFACT] [--out FILE]

PART is one of lookup, host, sweep, pair, edits, laws, equal. Speeds are ratios of runs that take turns; the load of the
machine stands beside each. `--target` is the widened demo (examples/widen_demo.py) exported with `--exit 2`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import edgekit
from edgekit.artifact import open_artifact
from edgekit.cache import CachePolicy, Storage
from edgekit.interfaces import Abilities, Chunk
from edgekit.plugins import load_target
from edgekit.runtime.drafting import Drafting, Playback, Unpaced
from edgekit.runtime.drafting.costs import Probe, by_turns
from edgekit.runtime.drafting.ngram import Corpus, Ngrams, TextIndex
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.sampling import gumbel_argmax
from edgekit.runtime.text import read_codec

ROOT = Path(__file__).parents[1]
HELD_OUT = [json.loads(line)["text"] for line in (ROOT / "edgekit/_demo/held_out.jsonl").read_text().splitlines()]
TOKENS = 64


def lookup(asked: Any) -> dict[str, Any]:
    """Microseconds to append a token and to look up, by the length of the text."""
    chance, found = np.random.default_rng(0), {}
    for length in (1_000, 16_000, 64_000, 1_000_000):
        text = chance.zipf(1.3, length).clip(0, 32_000).tolist()
        index = TextIndex()
        began = perf_counter()
        index.extend(text)
        append = (perf_counter() - began) / length
        times = []
        for token in text[:2_000]:
            index.extend([token])
            began = perf_counter()
            index.find(8)
            times.append(perf_counter() - began)
        corpus = Corpus(text)
        began = perf_counter()
        for place in range(1_000):
            corpus.find(text[place : place + 4], 8)
        found[length] = {
            "append_us": append * 1e6,
            "lookup_us": median(times) * 1e6,
            "corpus_lookup_us": (perf_counter() - began) * 1e3,
        }
    return {"by_length": found}


class Nothing:
    """An engine that takes no time: one likeliest token after another, over 32,000."""

    def __init__(self, vocabulary: int = 32_000, rows: int = 16) -> None:
        self.abilities = Abilities(
            vocabulary=vocabulary, max_states=1, max_chunk_tokens=64, kv_bits=(16,), exact="always"
        )
        self.logits = np.zeros((64, vocabulary), np.float32)
        self.logits[:, 7] = 1.0

    def start(self, storage: Storage) -> Any:
        return State()

    def forward(self, chunks: Sequence[Chunk]) -> list[Any]:
        for chunk in chunks:
            state: Any = chunk.state
            state.length = state.position = state.position + len(chunk.tokens)
        return [self.logits[: chunk.rows] for chunk in chunks]

    def close(self) -> None: ...


class State:
    position = length = bytes = 0

    def rewind(self, count: int) -> None:
        self.length = self.position = self.position - count

    def close(self) -> None: ...


def host(asked: Any) -> dict[str, Any]:
    """Microseconds of a step outside the engine, greedy over 32,000 tokens."""
    codec, found = read_codec(Path(asked.small)), {}
    kinds: dict[str, Any] = {
        "plain": None,
        "four wrong proposals": Drafting(lambda prompt: Playback([5] * 9_000), 4),
        "four right proposals": Drafting(lambda prompt: Playback([7] * 9_000), 4),
        "prompt lookup": Unpaced(Ngrams(tokens=4)),
    }
    for name, drafting in kinds.items():
        times = []
        for _ in range(5):
            storage = Storage(capacity_tokens=8_192, kv_bits=16)
            engine: Any = Nothing()
            with Runtime(engine, codec, storage=storage, policy=CachePolicy(), drafting=drafting) as runtime:
                runtime.complete([1] * 30, max_tokens=2_000)
                metrics = runtime.metrics()
            times.append(metrics.host_s / metrics.steps * 1e6)
        found[name] = {"step_us": min(times), "median_us": median(times), "tokens_per_step": 2_000 / metrics.steps}
    return {"by_drafter": found}


class Known:
    """Plays back a text with a given chance that each token is right."""

    def __init__(self, text: Sequence[int], rate: float, seed: int) -> None:
        self.text, self.rate, self.chance = text, rate, random.Random(seed)

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        following = self.text[len(history) : len(history) + limit]
        return [token if self.chance.random() < self.rate else (token + 1) % 4096 for token in following]

    def observe(self, accepted: Sequence[int]) -> None: ...
    def close(self) -> None: ...


def sweep(asked: Any) -> dict[str, Any]:
    """Measured speed-up against E / (c(g+1) + h), at acceptances and lengths that are set."""
    prompt = HELD_OUT[0][:900]
    cells, costs = [], None
    with edgekit.open(asked.target) as runtime:
        tokens = runtime.encode(prompt)
        text = [*tokens, *runtime.generate(prompt, max_tokens=asked.tokens, ignore_eos=True).tokens]
        with_probe = Probe(runtime.engine, runtime.storage)
        costs = by_turns({rows: lambda rows=rows: with_probe.seconds(rows) for rows in with_probe.sizes})
        with_probe.close()
    with ExitStack() as opened:
        plain = opened.enter_context(edgekit.open(asked.target))
        drafting = Settable(text)
        drafted = opened.enter_context(edgekit.open(asked.target, drafting=drafting))
        for length in (1, 3, 5, 7):
            for rate in (0.0, 0.3, 0.6, 0.8, 0.9, 1.0):
                drafting.length, drafting.rate = length, rate
                pairs = [(decoding(plain, tokens, asked), decoding(drafted, tokens, asked)) for _ in range(asked.turns)]
                plain_s = min(one["step_s"] for one, _ in pairs)
                cell = min((two for _, two in pairs), key=lambda each: each["seconds"])
                expected = cell["tokens"] / cell["steps"]
                cost = cell["verify_s"] / plain_s
                host_share = cell["host_s"] / plain_s
                measured = min(one["seconds"] for one, _ in pairs) / cell["seconds"]
                cells.append(
                    {
                        "length": length,
                        "rate": rate,
                        "tokens_per_step": expected,
                        "measured": measured,
                        "model": expected / (costs[length + 1] / costs[1] + host_share),
                        "model_of_run": expected / (cost + host_share),
                        "same_text": all(one["text"] == two["text"] for one, two in pairs),
                    }
                )
    return {
        "cost": {str(rows): seconds / costs[1] for rows, seconds in costs.items()},
        "one_s": costs[1],
        "cells": cells,
    }


class Settable:
    """A source whose length and acceptance are set between runs."""

    pace = None
    length, rate = 1, 1.0

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text

    @property
    def tokens(self) -> int:
        return self.length

    def start(self, request: Any) -> Known:
        return Known(self.text, self.rate, 1)

    def close(self) -> None: ...


def decoding(runtime: Any, tokens: Sequence[int], asked: Any, **options: Any) -> dict[str, Any]:
    """One answer, timed from its first token on."""
    before = runtime.metrics()
    answer = runtime.complete(list(tokens), max_tokens=asked.tokens, ignore_eos=True, **options)
    after = runtime.metrics()
    steps = max(1, after.steps - before.steps - 1)
    timings = answer.timings
    return {
        "text": answer.tokens,
        "seconds": timings.decode_s,
        "tokens": timings.tokens - 1,
        "steps": steps,
        "step_s": timings.decode_s / steps,
        "verify_s": (timings.decode_s - (after.host_s - before.host_s)) / steps,
        "host_s": (after.host_s - before.host_s) / steps,
        "proposed": timings.proposed,
        "accepted": timings.accepted,
    }


def pair(asked: Any) -> dict[str, Any]:
    """Every drafter against plain decoding on held-out code: greedy, and sampled."""
    return against_plain(asked, [text[:700] for text in HELD_OUT[: asked.prompts]])


def edits(asked: Any) -> dict[str, Any]:
    """A function, then the same one begun again under another name: text that repeats itself."""
    prompts = []
    for text in HELD_OUT:
        start = text.find("\ndef ", 200)
        code = text[start : start + 500]
        if start > 0 and len(code) == 500:
            head = code[: code.find("\n", 60) + 1]
            prompts.append(f"{code}\n\n\n# the same, again\n{head}")
    return against_plain(asked, prompts[: asked.prompts])


def against_plain(asked: Any, prompts: Sequence[str]) -> dict[str, Any]:
    drafts = {"draft model": asked.draft, "ngram": "ngram", "early exit": "early-exit", "auto": f"auto:{asked.draft}"}
    found: dict[str, Any] = {}
    for how, options in (("greedy", {}), ("temperature 0.7", {"temperature": 0.7, "seed": 1})):
        for name, draft in drafts.items():
            with edgekit.open(asked.target) as plain, edgekit.open(asked.target, draft=draft) as drafted:
                ratios, equal = [], 0
                for prompt in prompts:
                    tokens = plain.encode(prompt)
                    one, two = decoding(plain, tokens, asked, **options), decoding(drafted, tokens, asked, **options)
                    ratios.append((one["seconds"], two["seconds"]))
                    equal += one["text"] == two["text"]
                report = drafted.speculation()
            assert report is not None
            found[f"{name}, {how}"] = {
                "speed_up": sum(one for one, _ in ratios) / sum(two for _, two in ratios),
                "median_speed_up": median(one / two for one, two in ratios),
                "equal_texts": f"{equal} of {len(prompts)}",
                "report": report.model_dump(),
                "load": os.getloadavg()[0],
            }
            print(name, how, found[f"{name}, {how}"]["speed_up"], flush=True)
    return {"tokens": asked.tokens, "prompts": len(prompts), "by_drafter": found}


def laws(asked: Any) -> dict[str, Any]:
    """Acceptance of one drafted token under shared noise, under the rejection rule, and of independent draws."""
    target, draft = (rows_of(path) for path in (asked.small, asked.small_draft))
    found = {}
    for temperature in (0.3, 0.7, 1.0):
        p, q = (softmax(rows / temperature) for rows in (target, draft))
        same = [
            gumbel_argmax(one, None, seed, place) == gumbel_argmax(two, None, seed, place)
            for seed in range(8)
            for place, (one, two) in enumerate(zip(target / temperature, draft / temperature, strict=True))
        ]
        found[str(temperature)] = {
            "shared_noise": float(np.mean(same)),
            "rejection": float(np.minimum(p, q).sum(axis=1).mean()),
            "independent": float((p * q).sum(axis=1).mean()),
        }
    greedy = float((target.argmax(axis=1) == draft.argmax(axis=1)).mean())
    return {"positions": len(target), "greedy": greedy, "by_temperature": found}


def rows_of(path: str) -> Any:
    artifact = open_artifact(path)
    engine, codec = load_target(artifact.plan.target).open(artifact.plan, artifact.folder), read_codec(artifact.folder)
    rows = []
    for text in HELD_OUT[:8]:
        state = engine.start(artifact.plan.storage)
        tokens = codec.encode(text[:1500], add_special_tokens=True)[:256]
        rows.append(np.array(engine.forward([Chunk(state, tokens, len(tokens))])[0][32:]))
        state.close()
    engine.close()
    return np.concatenate(rows)


def softmax(rows: Any) -> Any:
    chances = np.exp(rows.astype(np.float64) - rows.max(axis=1, keepdims=True))
    return chances / chances.sum(axis=1, keepdims=True)


def equal(asked: Any) -> dict[str, Any]:
    """Greedy texts on 500 prompts: equal to plain decoding, in exact mode and by default."""
    prompts = [text[start : start + 160] for text in HELD_OUT for start in range(0, len(text) - 200, 700)][:500]
    found: dict[str, Any] = {"prompts": len(prompts), "tokens": 24}
    for exact in (True, False):
        with edgekit.open(asked.small, exact=exact) as runtime:
            plain = [runtime.generate(prompt, max_tokens=24).tokens for prompt in prompts]
        for name in ("ngram", "early-exit", asked.small_draft):
            with edgekit.open(asked.small, exact=exact) as other:
                source = kind_of(name, other, asked)
                with Runtime(
                    other.engine, other.codec, storage=other.storage, policy=other.policy, drafting=source,
                    chunk_tokens=other.artifact.plan.chunk_tokens, eos=frozenset({0}),
                ) as runtime:  # fmt: skip
                    texts = [runtime.generate(prompt, max_tokens=24).tokens for prompt in prompts]
                    proposed = runtime.metrics().proposed
            wrong = [place for place, (one, two) in enumerate(zip(plain, texts, strict=True)) if one != two]
            label = f"{'draft model' if name == asked.small_draft else name}, {'exact' if exact else 'default'}"
            margins = [margin(asked.small, prompts[place], plain[place], texts[place]) for place in wrong]
            found[label] = {"equal": len(prompts) - len(wrong), "margins": margins, "proposed": proposed}
            print(label, found[label], flush=True)
    return found


def kind_of(name: str, runtime: Any, asked: Any) -> Any:
    """A drafter that always drafts, paying or not."""
    from edgekit.runtime.drafting.costs import known_costs
    from edgekit.runtime.drafting.early_exit import EarlyExit
    from edgekit.runtime.drafting.opening import open_draft

    if name == "ngram":
        return Unpaced(Ngrams(tokens=4))
    if name == "early-exit":
        return Unpaced(EarlyExit(runtime.engine, runtime.engine.abilities.exits[0], 1e-3), 3)
    costs = known_costs(runtime.engine, runtime.storage, runtime.artifact.sha256)
    arguments = (Path(asked.small_draft), runtime.artifact, runtime.engine, costs)
    return Unpaced(open_draft(*arguments, policy=runtime.policy, storage=runtime.storage), 4)


def margin(path: str, prompt: str, one: Sequence[int], two: Sequence[int]) -> float:
    """How far apart the two likeliest tokens were where the texts part, in log-probability."""
    place = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)) - 1)
    with edgekit.open(path) as runtime:
        answer = runtime.generate(prompt, max_tokens=place + 1, logprobs=2)
    top = answer.logprobs[place].top
    return top[0][1] - top[1][1]


PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    each.__name__: each for each in (lookup, host, sweep, pair, edits, laws, equal)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    for name in ("target", "draft", "small", "small-draft"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/data/speculation.json")
    asked = parser.parse_args()
    for part in asked.parts:
        before = os.getloadavg()[0]
        found = {**PARTS[part](asked), "load": [before, os.getloadavg()[0]], "cores": os.cpu_count()}
        known = json.loads(asked.out.read_text()) if asked.out.exists() else {}
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps({**known, part: found}, indent=1) + "\n")
        print(part, json.dumps(found)[:3000], flush=True)


if __name__ == "__main__":
    main()
