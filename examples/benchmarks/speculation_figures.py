"""Measures what docs/speculation.md says, on this machine, and stores it as JSON.

    python -m examples.benchmarks.speculation_figures PART... --target ARTIFACT --draft ARTIFACT \\
        [--small ARTIFACT] [--out FILE]

PART is one of lookup, host, sweep, never, pair, edits, laws, equal. Speeds are ratios on the wall clock of runs that
take turns, `never`, `pair` and `edits` step by step on one engine: what else the machine does meets both. The load
stands beside. `--target` is a large model with exits: the widened demo (examples/training/widen_demo.py) exported with
`--exit 2`, for sweep and never the random one of 1.2 B parameters. `equal` takes `--pair TARGET DRAFT` for each engine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, NamedTuple

import numpy as np

import edgekit
from edgekit.artifact.artifact import open_artifact
from edgekit.contracts.capabilities import Capabilities
from edgekit.contracts.engine import Chunk
from edgekit.contracts.feeding import feed
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.methods.drafters.early_exit import EarlyExit
from edgekit.plugins import load_target
from edgekit.runtime.generation.sampling import gumbel_argmax
from edgekit.runtime.generation.tokenizer import read_codec, read_eos
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.speculation.controller import SpeculationController
from edgekit.runtime.speculation.costs import CostProbe, Costs, by_turns, known_costs
from edgekit.runtime.speculation.ngram import Ngrams, TextIndex
from edgekit.runtime.speculation.open import open_draft, open_speculation
from edgekit.runtime.speculation.speculation import Speculation
from edgekit.testing.drafting import Drafting, FixedLengthDrafting, ReplayDrafter

assert sys.platform != "win32"

ROOT = Path(__file__).parents[2]
HELD_OUT = [json.loads(line)["text"] for line in (ROOT / "edgekit/_demo/held_out.jsonl").read_text().splitlines()]
TOKENS = 64
EQUAL_TOKENS, NOISE_PROMPTS = 12, 100
SAMPLED = "temperature 0.7"
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, SAMPLED: {"temperature": 0.7, "seed": 1}}


def lookup(asked: Any) -> dict[str, Any]:
    """Microseconds to append a token and to look up, by the length of the text."""
    chance, found = np.random.default_rng(0), {}
    for length in (1_000, 16_000, 64_000, 1_000_000):
        text = chance.zipf(1.3, length).clip(0, 32_000).tolist()
        index = TextIndex()
        began = process_time()
        index.extend(text)
        append = (process_time() - began) / length
        times = []
        for token in text[:2_000]:
            index.extend([token])
            began = process_time()
            index.find(8)
            times.append(process_time() - began)
        found[length] = {
            "append_us": append * 1e6,
            "lookup_us": median(times) * 1e6,
        }
    return {"by_length": found}


class Nothing:
    """An engine that takes no time: one likeliest token after another, over 32,000."""

    def __init__(self, vocabulary: int = 32_000, rows: int = 16) -> None:
        self.capabilities = Capabilities(
            vocabulary=vocabulary, max_states=1, max_chunk_tokens=64, kv_bits=(16,), exact="always"
        )
        self.logits = np.zeros((64, vocabulary), np.float32)
        self.logits[:, 7] = 1.0

    def start(self, storage: KVCacheConfig) -> Any:
        return State()

    def state_bytes(self, storage: KVCacheConfig) -> int:
        return 0

    def forward(self, chunks: Sequence[Chunk]) -> list[Any]:
        for chunk in chunks:
            state: Any = chunk.state
            state.length = state.position = state.position + len(chunk.tokens)
        return [self.logits[: chunk.num_logits] for chunk in chunks]

    def close(self) -> None: ...


class State:
    position = length = bytes = num_replayed = 0

    def rewind(self, count: int) -> None:
        self.length = self.position = self.position - count

    def close(self) -> None: ...


def host(asked: Any) -> dict[str, Any]:
    """Microseconds of a step outside the engine, greedy over 32,000 tokens."""
    codec, found = read_codec(Path(asked.small)), {}
    kinds: dict[str, Any] = {
        "plain": None,
        "four wrong proposals": Drafting(lambda prompt: ReplayDrafter([5] * 9_000), 4),
        "four right proposals": Drafting(lambda prompt: ReplayDrafter([7] * 9_000), 4),
        "prompt lookup": FixedLengthDrafting(Ngrams(tokens=4)),
    }
    for name, drafting in kinds.items():
        times = []
        for _ in range(5):
            storage = KVCacheConfig(capacity_tokens=8_192, kv_bits=16)
            engine: Any = Nothing()
            with Runtime(engine, codec, kv_config=storage, policy=KVEvictionPolicy(), drafting=drafting) as runtime:
                began = process_time()
                runtime.complete([1] * 30, max_tokens=2_000)
                metrics = runtime.metrics()
                times.append((process_time() - began) / metrics.steps * 1e6)
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
    """Measured speed-up against E / (c(g+1) + h), at acceptances and lengths that are set; drafting itself is free.

    Each turn measures an answer without drafts, the same with drafts, and the costs of forwards at that depth; what the
    machine does meanwhile meets all three. `h` is what a drafted step takes in Python.
    """
    prompt, cells = HELD_OUT[0][:200], []
    with ExitStack() as opened:
        plain = opened.enter_context(edgekit.open(asked.target, prefixes=0))
        tokens = plain.encode(prompt)
        text = [*tokens, *plain.generate(prompt, max_tokens=asked.tokens, ignore_eos=True).tokens]
        source = Settable(text)
        drafted = opened.enter_context(edgekit.open(asked.target, drafting=source, prefixes=0))
        depth = len(tokens) + asked.tokens // 2
        for length in (1, 3, 5, 7):
            for rate in (0.3, 0.6, 0.9, 1.0):
                source.length, source.rate = length, rate
                turns = [
                    sweep_turn(plain, drafted, text, len(tokens), depth, length, asked) for _ in range(asked.turns)
                ]
                shares = [turn["measured"] / turn["model"] for turn in turns]
                middle = sorted(turns, key=lambda turn: turn["measured"] / turn["model"])[len(turns) // 2]
                cells.append({"length": length, "rate": rate, **middle, "shares": shares, "share": median(shares)})
                print(cells[-1], flush=True)
    return {
        "median_of_model": median(cell["share"] for cell in cells),
        "least_of_model": min(cell["share"] for cell in cells),
        "cells": cells,
    }


def sweep_turn(
    plain: Any, drafted: Any, text: Sequence[int], prompt: int, depth: int, length: int, asked: Any
) -> dict[str, Any]:
    one = decoding(plain, text[:prompt], asked)
    costs = forward_costs(plain, text[:depth], (1, length + 1))
    two = decoding(drafted, text[:prompt], asked)
    host = two["host_s_per_step"] - one["host_s_per_step"]
    return {
        "tokens_per_step": two["tokens_per_step"],
        "measured": one["wall_s"] / two["wall_s"],
        "model": two["tokens_per_step"] / ((costs[length + 1] + host) / costs[1]),
        "cost": costs[length + 1] / costs[1],
        "host_us": two["host_s_per_step"] * 1e6,
        "same_text": one["text"] == two["text"],
    }


def forward_costs(runtime: Any, tokens: Sequence[int], sizes: tuple[int, ...]) -> dict[int, float]:
    """Median seconds of forwards behind these tokens, by turns; as in decoding, one follows the other at once."""
    state = runtime.engine.start(runtime.kv_config)
    feed(runtime.engine, state, list(tokens))
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for size in (*sizes, *sizes * 8):
        began = perf_counter()
        runtime.engine.forward([Chunk(state, list(tokens[:size]), size)])
        times[size].append(perf_counter() - began)
        state.rewind(size)
    state.close()
    return {size: median(taken[1:]) for size, taken in times.items()}


class Wrong(NamedTuple):
    """The worst drafter: quick, sure, and never right."""

    wrong: int
    cost_s: float = 0.0
    name: str = "never right"
    tokens: int = 8
    bytes: int = 0
    reads_hidden: bool = False

    def start(self, request: Any) -> WrongDrafter:
        return WrongDrafter(self.wrong)

    def draft_s(self, tokens: int) -> float:
        return self.cost_s * tokens

    def close(self) -> None: ...


class WrongDrafter:
    match_length = 0

    def __init__(self, wrong: int) -> None:
        self._wrong = wrong

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        return [self._wrong] * limit

    def observe(self, accepted: Sequence[int]) -> None: ...
    def close(self) -> None: ...

    def catch_up_s(self, history: Sequence[int]) -> float:
        return 0.0


def never(asked: Any) -> dict[str, Any]:
    """Is drafting ever slower than plain decoding? Adapting drafters on text that they cannot draft.

    Two runtimes on one engine, one that drafts and one that does not, take turns step by step: what else the machine
    does meets both alike. `--small` needs a context of 2,048 tokens.
    """
    found: dict[str, Any] = {}
    given = (("large", asked.target, asked.tokens * 2), ("small", asked.small, asked.tokens * 24))
    for name, path, tokens in (each for each in given if each[1]):
        with edgekit.open(path, sequences=2, prefixes=0) as opened:
            engine, prompt = opened.engine, opened.encode(HELD_OUT[1][:400])
            options: dict[str, Any] = {"temperature": 1.0, "seed": 5}  # text that nobody can guess
            sure = opened.complete(prompt, max_tokens=tokens, ignore_eos=True, **options).tokens
            unused = next(token for token in range(engine.capabilities.vocabulary) if token not in sure)
            artifact = open_artifact(path)
            sources: list[Any] = [
                Speculation(
                    [Wrong(unused)], SpeculationController(known_costs(engine, opened.kv_config, artifact.sha256))
                )
            ]
            for way in ("ngram", *(("early-exit",) if engine.capabilities.exits else ())):
                held: dict[str, Any] = {"policy": opened.policy, "kv_config": opened.kv_config}
                sources.append(open_speculation(way, engine, artifact, opened.codec, **held))
            for source in sources:
                plain, drafted = beside(opened), beside(opened, source)
                turns = [by_steps(plain, drafted, prompt, tokens, turn % 2, options) for turn in range(2 * asked.turns)]
                report: Any = drafted.speculation()
                kind = report.proposals[0].name
                ratios = [turn.plain_s / turn.drafted_s for turn in turns]
                found[f"{name}, {kind}"] = {
                    "tokens": tokens,
                    "over_plain": sum(turn.plain_s for turn in turns) / sum(turn.drafted_s for turn in turns),
                    "ratios": ratios,
                    "drafted_steps": report.drafted_steps,
                    "steps": report.steps,
                }
                print(name, kind, found[f"{name}, {kind}"], flush=True)
    return {"by_drafter": found, "least": min(one["over_plain"] for one in found.values())}


class Turn(NamedTuple):
    """One answer from two runtimes, which take turns step by step."""

    plain_s: float
    drafted_s: float
    tokens_per_step: float
    same_text: bool


def by_steps(
    plain: Runtime, drafted: Runtime, prompt: Sequence[int], tokens: int, first: int, options: dict[str, Any]
) -> Turn:
    """Advance both answers from their first token on; the one with fewer tokens goes next."""
    runtimes, spent, steps = (plain, drafted), [0.0, 0.0], [0, 0]
    streams = [runtime.submit(list(prompt), max_tokens=tokens, ignore_eos=True, **options) for runtime in runtimes]
    for which in (first, 1 - first):
        while not streams[which].generated_tokens:
            runtimes[which].step()
    begun = streams[1].generated_tokens
    while (behind := min((streams[which].generated_tokens, which != first, which) for which in (0, 1)))[0] < tokens:
        which = behind[2]
        began = perf_counter()
        runtimes[which].step()
        spent[which] += perf_counter() - began
        steps[which] += 1
    one, other = (stream.answer().tokens for stream in streams)
    assert len(one) == len(other) == tokens
    return Turn(spent[0], spent[1], (tokens - begun) / steps[1], one == other)


def beside(drafted: Runtime, source: Any = None) -> Runtime:
    """Another runtime on the same engine."""
    return Runtime(drafted.engine, drafted.codec, kv_config=drafted.kv_config, policy=drafted.policy, drafting=source)


class Settable:
    """A source whose length and acceptance are set between runs."""

    controller = None
    length, rate = 1, 1.0

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text

    @property
    def tokens(self) -> int:
        return self.length

    def start(self, request: Any) -> Known:
        return Known(self.text, self.rate, 1)

    def close(self) -> None: ...


def decoding(runtime: Any, tokens: Sequence[int], asked: Any) -> dict[str, Any]:
    """Return text, time and steps of one answer, counted after its first token."""
    stream = runtime.submit(list(tokens), max_tokens=asked.tokens, ignore_eos=True)
    while not stream.generated_tokens:
        runtime.step()
    first, before, wall = stream.generated_tokens, runtime.metrics(), perf_counter()
    text = list(stream.answer().tokens)
    wall, after = perf_counter() - wall, runtime.metrics()
    count, steps = len(text) - first, after.steps - before.steps
    return {
        "text": text, "wall_s": wall / count, "tokens_per_step": count / steps,
        "host_s_per_step": (after.host_s - before.host_s) / steps,
    }  # fmt: skip


def cpu_costs(runtime: Any, most: int = 9) -> dict[int, float]:
    """Processor seconds of forwards, by their tokens."""
    probe = CostProbe(runtime.engine, runtime.kv_config)

    def spent(rows: int) -> float:
        began = process_time()
        probe.seconds(rows)
        return process_time() - began

    found = by_turns({rows: partial(spent, rows) for rows in probe.sizes if rows <= most})
    probe.close()
    return found


def pair(asked: Any) -> dict[str, Any]:
    """Compare every drafter with plain decoding on held-out code, greedy and sampled."""
    return against_plain(asked, [text[:300] for text in HELD_OUT[: asked.prompts or 6]])


def edits(asked: Any) -> dict[str, Any]:
    """A function, then the same one begun again under another name: text that repeats itself."""
    prompts = []
    for text in HELD_OUT:
        start = text.find("\ndef ", 200)
        code = text[start : start + 300]
        if start > 0 and len(code) == 300:
            head = code[: code.find("\n", 60) + 1]
            prompts.append(f"{code}\n\n\n# the same, again\n{head}")
    return against_plain(asked, prompts[: asked.prompts or 6])


def against_plain(asked: Any, prompts: Sequence[str]) -> dict[str, Any]:
    """Return drafters that adapt, and the draft model at fixed lengths, which shows its gain when it is never off."""
    drafts = {
        "draft model": asked.draft,
        "draft model, always 1": 1,
        "draft model, always 3": 3,
        "ngram": "ngram",
        "early exit": "early-exit",
        "auto": f"auto:{asked.draft}",
    }
    found: dict[str, Any] = {}
    for name, draft in drafts.items():
        for how, options in SAMPLINGS.items():
            fixed = isinstance(draft, int)
            wanted = asked.draft if fixed else draft
            with edgekit.open(asked.target, draft=wanted, sequences=2, prefixes=0) as drafted:
                if fixed:
                    drafting: Any = drafted._drafting
                    drafted._drafting = FixedLengthDrafting(drafting._stats[0].method, draft)
                plain = beside(drafted)
                turns = [
                    by_steps(plain, drafted, plain.encode(prompt), asked.tokens, number % 2, options)
                    for number, prompt in enumerate(prompts)
                ]
                report = None if fixed else drafted.speculation()
                metrics = drafted.metrics()
            found[f"{name}; {how}"] = {
                "speed_up": sum(turn.plain_s for turn in turns) / sum(turn.drafted_s for turn in turns),
                "speed_ups": [turn.plain_s / turn.drafted_s for turn in turns],
                "tokens_per_step": median(turn.tokens_per_step for turn in turns),
                "accepted": metrics.accepted,
                "proposed": metrics.proposed,
                "equal_texts": sum(turn.same_text for turn in turns),
                "report": report.model_dump() if report else None,
                "load": os.getloadavg()[0],
            }
            shown = {key: value for key, value in found[f"{name}; {how}"].items() if key != "report"}
            print(name, how, shown, flush=True)
    with edgekit.open(asked.target) as plain:
        costs = cpu_costs(plain)
    return {
        "tokens": asked.tokens,
        "prompts": len(prompts),
        "cost": {rows: seconds / costs[1] for rows, seconds in costs.items()},
        "by_drafter": found,
    }


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
    """Texts with every drafter, always on, against plain ones: greedy and sampled, in exact mode and by default."""
    cuts = [text[start : start + 160] for text in HELD_OUT for start in range(0, len(text) - 200, 700)]
    prompts = cuts[: asked.prompts or 500]
    sampled = prompts[: asked.sampled]
    known = json.loads(asked.out.read_text()).get("equal", {}) if asked.out.exists() else {}
    found: dict[str, Any] = known.get("by_engine", {})
    for target, draft in asked.pairs or [(asked.small, asked.small_draft)]:
        name = open_artifact(target).plan.target
        with edgekit.open(target, prefixes=0) as runtime:
            modes = {"exact": True, "default": False}
            if runtime.engine.capabilities.exact == "always":
                modes = {"any": False}
            moved = max(noise(runtime, prompt) for prompt in prompts[:NOISE_PROMPTS])
        found[name] = {
            f"{kind}, {mode}": figures
            for mode, exact in modes.items()
            for kind, figures in texts_of(target, draft, {"greedy": prompts, SAMPLED: sampled}, exact).items()
        }
        found[name]["noise"] = moved
        print(name, "noise", moved, flush=True)
        refuse_changed_texts(name, found[name])
    return {"tokens": EQUAL_TOKENS, "by_engine": found}


def refuse_changed_texts(engine: str, found: dict[str, Any]) -> None:
    """Raise where drafting changed a text: in exact mode any, otherwise one whose margin is above the noise."""
    for name, figures in found.items():
        if name == "noise":
            continue
        is_exact = name.endswith(("exact", "any"))
        if figures["proposed"] == 0 or (is_exact and figures["equal"] < figures["of"]):
            raise AssertionError(f"{engine}: {name}: {figures}")
        if any(margin >= found["noise"] for margin in figures["margins"]):
            raise AssertionError(f"{engine}: {name}: texts part where the choice was clear: {figures}")


def texts_of(target: str, draft: str, asked: dict[str, Sequence[str]], exact: bool) -> dict[str, Any]:
    """For each drafter and way of sampling, how many texts are the plain ones."""
    found: dict[str, Any] = {}
    with edgekit.open(target, exact=exact) as plain:
        texts = {how: answers(plain, prompts, SAMPLINGS[how]) for how, prompts in asked.items()}
        for name in ("ngram", "early-exit", "draft model", "auto"):
            with edgekit.open(target, exact=exact) as other, ExitStack() as opened:
                source = kind_of(name, other, draft)
                artifact = open_artifact(target)
                bounds = artifact.plan
                runtime = opened.enter_context(
                    Runtime(
                        other.engine, other.codec, kv_config=other.kv_config, policy=other.policy, drafting=source,
                        chunk_tokens=bounds.chunk_tokens, eos=read_eos(artifact.folder, bounds.model.eos_ids),
                    )
                )  # fmt: skip
                for how, prompts in asked.items():
                    before = runtime.metrics()
                    drafted = answers(runtime, prompts, SAMPLINGS[how])
                    after = runtime.metrics()
                    parted = [place for place, text in enumerate(texts[how]) if text != drafted[place]]
                    found[f"{name}, {how}"] = {
                        "equal": len(prompts) - len(parted),
                        "of": len(prompts),
                        "margins": [margin(plain, prompts[i], texts[how][i], drafted[i]) for i in parted]
                        if how == "greedy"
                        else [],
                        "proposed": after.proposed - before.proposed,
                        "accepted": after.accepted - before.accepted,
                    }
                    print(open_artifact(target).plan.target, exact, name, how, found[f"{name}, {how}"], flush=True)
    return found


def answers(runtime: Any, prompts: Sequence[str], options: dict[str, Any]) -> list[tuple[int, ...]]:
    return [runtime.generate(prompt, max_tokens=EQUAL_TOKENS, **options).tokens for prompt in prompts]


class Eager(SpeculationController):
    """A controller that goes on believing that verifying and drafting are free."""

    def end(self, requests: int, computed: int, generated: int, seconds: float) -> None:
        """Learn nothing."""

    @property
    def is_due_plain(self) -> bool:
        return False


def kind_of(name: str, runtime: Any, draft: str) -> Any:
    """A drafter that always drafts, paying or not; `auto` chooses among all of them by how often they are right."""
    first = (runtime.engine.capabilities.exits or (0,))[0]
    free = Costs({1: 1.0, 16: 1.0})
    kinds: dict[str, Callable[[], Any]] = {
        "ngram": lambda: Ngrams(tokens=4),
        "early-exit": lambda: EarlyExit(runtime.engine, first, 1e-3, tokens=3),
        "draft model": lambda: open_draft(
            Path(draft), runtime.artifact, runtime.engine, free, policy=runtime.policy, kv_config=runtime.kv_config
        ),
    }
    if name == "auto":
        return Speculation([make() for make in kinds.values()], Eager(free))
    return FixedLengthDrafting(kinds[name](), 4)


def margin(runtime: Any, prompt: str, one: Sequence[int], two: Sequence[int]) -> float:
    """Margin between the two likeliest tokens where the texts part, in log-probability."""
    place = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)) - 1)
    answer = runtime.generate(prompt, max_tokens=place + 1, logprobs=2)
    top = answer.logprobs[place].top
    return float(top[0][1] - top[1][1])


def noise(runtime: Any, prompt: str) -> float:
    """By how much the margin of the two likeliest tokens moves, at most, when rows are computed four at a time."""
    engine, text = runtime.engine, runtime.encode(prompt)
    rows = {}
    for size in (1, 4):
        state = engine.start(runtime.kv_config)
        engine.forward([Chunk(state, text[:-16], 0)])
        parts = [text[len(text) - 16 + start :][:size] for start in range(0, 16, size)]
        rows[size] = np.concatenate([np.array(engine.forward([Chunk(state, part, size)])[0]) for part in parts])
        state.close()
    likeliest = np.argsort(rows[1], axis=1)[:, -2:]
    margins = [np.diff(np.take_along_axis(each, likeliest, axis=1), axis=1) for each in rows.values()]
    return float(np.abs(margins[0] - margins[1]).max())


PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    each.__name__: each for each in (lookup, host, sweep, never, pair, edits, laws, equal)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    for name in ("target", "draft", "small", "small-draft"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--prompts", type=int, help="6, and 500 for equal")
    parser.add_argument("--sampled", type=int, help="How many of the prompts equal samples too; all without it.")
    parser.add_argument("--pair", dest="pairs", nargs=2, action="append", metavar=("TARGET", "DRAFT"))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/speculation.json")
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
