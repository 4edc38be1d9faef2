"""Retrieval of facts that lie outside a window's newest tokens, and perplexity of continued text, by each scorer.

    python -m examples.benchmarks.kept_tokens ARTIFACT [--windows 256 512] [--times 4] [--texts 6] \\
        [--tasks "one fact" table] [--first 100] [--keep newest scored] [--newest 0.5 0.75] [--starts 0 2000] \\
        [--skip retrieval|text] [--json FILE]

A text of `times` the window holds facts in its first part, which a window of the newest tokens has dropped when the
question comes: one fact, four facts of three kinds, and a table of keys and values; `together` has all of them in one
text. The model answers greedily; an answer is right if it holds the fact. `full` reads the same texts without a window.
Every other way has the same bytes. `--newest` varies the share of a scored window that belongs to its newest tokens.
Policies are chosen on texts from `--first 100` on, and judged on those from 0.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import edgekit
from edgekit.contracts.feeding import feed
from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.enginekit.keeping import scorers
from examples.benchmarks.endless import losses_of

if TYPE_CHECKING:
    from edgekit.contracts.engine import Logits, State

HELD_OUT = Path(__file__).parent / "held_out"
TEXTS = ("prose.txt", "code.txt")
SINKS, ANSWER_TOKENS = 4, 6
FULL = "full"
CITIES = ("Paris", "London", "Tokyo", "Cairo", "Lima", "Oslo", "Rome", "Madrid", "Berlin", "Vienna", "Athens", "Dublin")
NAMES = ("Irina", "Tomas", "Fatima", "Olaf", "Bruno", "Keiko", "Nadia", "Samuel")
THINGS = ("umbrella", "lantern", "cactus", "violin", "marble", "pepper", "anchor", "saddle")


class Fact(NamedTuple):
    """A sentence for the text, the start of an answer about it, and what the answer must hold."""

    sentence: str
    question: str
    answer: str
    task: str = ""


class Sample(NamedTuple):
    tokens: list[int]
    facts: list[Fact]


def number(source: random.Random, place: int) -> Fact:
    city, value = CITIES[place], str(source.randrange(1000, 10_000))
    start = f"The special magic number of {city} is"
    return Fact(f"\n\n{start} {value}.\n\n", f"\n\n{start}", value)


def thing(source: random.Random, place: int) -> Fact:
    name, kept = NAMES[place], THINGS[source.randrange(len(THINGS))]
    return Fact(f"\n\n{name} keeps the {kept} in the cellar of the old house.\n\n", f"\n\n{name} keeps the", kept)


def person(source: random.Random, place: int) -> Fact:
    city, name = CITIES[place], NAMES[source.randrange(len(NAMES))]
    start = f"The person who came from {city} was called"
    return Fact(f"\n\n{start} {name}.\n\n", f"\n\n{start}", name)


def one_fact(source: random.Random) -> list[Fact]:
    return [number(source, source.randrange(len(CITIES)))._replace(task="one fact")]


def several_facts(source: random.Random) -> list[Fact]:
    places = source.sample(range(len(NAMES)), 4)
    kinds = (number, thing, person)
    return [source.choice(kinds)(source, place)._replace(task="four facts") for place in places]


def table(source: random.Random) -> list[Fact]:
    """Eight lines in one block, three of which are asked for."""
    lines = [(name, str(source.randrange(100, 1000))) for name in source.sample(CITIES, 8)]
    asked = source.sample(range(8), 3)
    whole = "\n\n" + "".join(f"key {name}: value {value}\n" for name, value in lines) + "\n"
    return [
        Fact(whole if count == 0 else "", f"\n\nkey {lines[line][0]}: value", lines[line][1], "table")
        for count, line in enumerate(asked)
    ]


def together(source: random.Random) -> list[Fact]:
    """Return the facts of the three tasks, no two with the same question."""
    while True:
        facts = [*one_fact(source), *several_facts(source), *table(source)]
        if len({fact.question for fact in facts}) == len(facts):
            return facts


TASKS: dict[str, Callable[[random.Random], list[Fact]]] = {
    "one fact": one_fact, "four facts": several_facts, "table": table, "together": together
}  # fmt: skip


def sample(runtime: edgekit.Runtime, task: str, seed: int, length: int, outside: int) -> Sample:
    """Return held-out text of `length` tokens with the facts of a task in its first `outside` tokens."""
    source = random.Random(f"{task} {seed}")
    text = runtime.encode((HELD_OUT / TEXTS[seed % 2]).read_text(), add_special_tokens=False)
    start = source.randrange(len(text))
    tokens = (text[start:] + text * (1 + length // len(text)))[:length]
    facts = TASKS[task](source)
    places = sorted((source.randrange(SINKS * 4, outside) for _ in facts), reverse=True)
    for place, fact in zip(places, facts, strict=True):
        tokens[place:place] = runtime.encode(fact.sentence, add_special_tokens=False) if fact.sentence else []
    return Sample(tokens, facts)


class SharedWindow(KVEvictionPolicy):
    """A scored window of which a share other than half belongs to its newest tokens."""

    newest: float = 0.5

    @property
    def protected(self) -> int:
        return max(self.block, int(((self.window or 0) - self.sinks) * self.newest))


def read(runtime: edgekit.Runtime, policy: KVEvictionPolicy, state: State, text: list[int]) -> Logits:
    """Feed the text that a state has not read yet; return the logits of its last token."""
    while True:
        policy.make_room(state, text)
        room = policy.remaining_capacity(state.length)
        piece = text[state.position : None if room is None else state.position + room]
        logits = feed(runtime.engine, state, piece, int(state.position + len(piece) == len(text)))
        if state.position == len(text):
            return logits


def right_answers(runtime: edgekit.Runtime, policy: KVEvictionPolicy, given: Sample) -> list[bool]:
    """Ask for every fact of a sample, each time in a state that goes on from what is cached after the text."""
    state = runtime.engine.start(runtime.kv_config)
    read(runtime, policy, state, given.tokens)
    cached, found = state.save(0, state.length), []
    state.close()
    for fact in given.facts:
        state, text = runtime.engine.start(runtime.kv_config), list(given.tokens)
        state.restore(cached)
        text += runtime.encode(fact.question, add_special_tokens=False)
        asked = len(text)
        for _ in range(ANSWER_TOKENS):
            text.append(int(read(runtime, policy, state, text)[-1].argmax()))
        state.close()
        found.append(fact.answer in runtime.decode(text[asked:]))
    return found


def retrieval(
    runtime: edgekit.Runtime, policy: KVEvictionPolicy, window: int, times: int, seeds: Iterable[int], task: str
) -> Iterator[dict[str, Any]]:
    """Count the right answers of one task, or of each task that a text has together."""
    right: dict[str, list[bool]] = {}
    for seed in seeds:
        given = sample(runtime, task, seed, window * times, window * (times - 1) - 128)
        for fact, is_right in zip(given.facts, right_answers(runtime, policy, given), strict=True):
            right.setdefault(fact.task, []).append(is_right)
    for part, found in right.items():
        yield {"text": window * times, "given": task, "task": part, "right": sum(found), "asked": len(found)}


def continued(
    runtime: edgekit.Runtime, policy: KVEvictionPolicy, window: int, name: str, start: int, tokens: int
) -> dict[str, Any]:
    """Return the perplexity of held-out text after a full window that begins at token `start`."""
    text = runtime.encode((HELD_OUT / name).read_text(), add_special_tokens=False)[start : start + window + tokens]
    found = math.exp(statistics.fmean(losses_of(runtime, text, policy, window)))
    return {"text": name, "start": start, "tokens": len(text) - window, "perplexity": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--windows", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--times", type=int, default=4, help="length of a text, in windows")
    parser.add_argument("--texts", type=int, default=6, help="texts of each task")
    parser.add_argument("--first", type=int, default=0, help="seed of the first text")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["one fact", "four facts", "table"])
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of continued text")
    parser.add_argument("--starts", type=int, nargs="+", default=[0], help="where continued text begins")
    parser.add_argument("--newest", type=float, nargs="+", default=[0.5], help="shares of a scored window")
    parser.add_argument("--keep", nargs="+", default=["newest", *scorers(), FULL])
    parser.add_argument("--kv-bits", type=int)
    parser.add_argument("--skip", choices=("retrieval", "text"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows, seeds = [], range(given.first, given.first + given.texts)
    for window, way in product(given.windows, given.keep):
        limits: dict[str, Any] = {} if way == FULL else {"window": window, "sinks": SINKS, "keep": way}
        with edgekit.open(given.artifact, prefixes=0, kv_bits=given.kv_bits, **limits) as runtime:
            plain = runtime.policy
            for share in given.newest if plain.is_scored else [None]:
                policy = plain if share is None else SharedWindow(**plain.model_dump(), newest=share)
                texts = product(TEXTS, given.starts) if given.skip != "text" else ()
                tasks = given.tasks if given.skip != "retrieval" else ()
                parts = chain(
                    (continued(runtime, policy, window, name, start, given.tokens) for name, start in texts),
                    *(retrieval(runtime, policy, window, given.times, seeds, task) for task in tasks),
                )
                for part in parts:
                    rows.append({"window": window, "keep": way, "newest": share, **part})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
