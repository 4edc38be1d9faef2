"""Conformance checks of adapters: each one changes only its own states, and dropping one leaves no trace."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgekit.contracts.engine import Chunk, Engine
from edgekit.contracts.feeding import feed
from edgekit.testing.judging import Judge, gap, refused, require, storage_for, words

if TYPE_CHECKING:
    from edgekit.contracts.engine import Logits


def check_adapters(engine: Engine, judge: Judge) -> None:
    """Check adapters if the judge has two different ones. An engine without adapters must refuse them."""
    if not engine.capabilities.adapters:
        with tempfile.TemporaryDirectory() as folder:
            refused(lambda: engine.load_adapter("one", Path(folder)), "an adapter of an engine without")
        return
    refused(lambda: engine.drop_adapter("one"), "dropping an adapter that is not loaded")
    with tempfile.TemporaryDirectory() as folder:
        refused(lambda: engine.load_adapter("one", Path(folder)), "an empty folder as an adapter")
    if not judge.adapters:
        return
    one, two = judge.adapters
    random = np.random.default_rng(10)
    tokens = words(engine, random, 12)
    base = _answer(engine, None, tokens)
    require(engine.load_adapter("one", one) > 0, "an adapter takes no bytes")
    require(engine.load_adapter("two", two) > 0, "an adapter takes no bytes")
    refused(lambda: engine.load_adapter("one", two), "an adapter under a name that is taken")
    names: list[str | None] = ["one", None, "two"]
    alone = [_answer(engine, name, tokens) for name in names]
    judge.same(alone[1], base, "the base model in a batch with adapters")
    for place in (0, 2):
        require(gap(alone[place], base) > judge.tolerance, f"adapter {names[place]} changes nothing")
    require(gap(alone[0], alone[2]) > judge.tolerance, "two different adapters give the same logits")
    _check_company(engine, judge, names, tokens, alone)
    _check_chunks(engine, judge, tokens, alone[0])
    _check_segments(engine, judge, tokens, alone[0])
    state = engine.start(storage_for(engine).model_copy(update={"adapter": "one"}))
    refused(lambda: engine.drop_adapter("one"), "dropping an adapter in use")
    judge.same(feed(engine, state, tokens, 2), alone[0], "after a drop was refused")
    state.close()
    engine.drop_adapter("one")
    refused(lambda: engine.start(storage_for(engine).model_copy(update={"adapter": "one"})), "a dropped adapter")
    judge.same(_answer(engine, "two", tokens), alone[2], "after another adapter was dropped")
    engine.load_adapter("one", two)
    judge.same(_answer(engine, "one", tokens), alone[2], "another adapter under the same name")


def _answer(engine: Engine, adapter: str | None, tokens: list[int]) -> Logits:
    state = engine.start(storage_for(engine).model_copy(update={"adapter": adapter}))
    logits = feed(engine, state, tokens, 2)
    state.close()
    return logits


def _check_company(
    engine: Engine, judge: Judge, names: Sequence[str | None], tokens: list[int], alone: Sequence[Logits]
) -> None:
    """Check chunks of several adapters in one call, then single tokens."""
    several = names[: engine.capabilities.max_states]
    states = [engine.start(storage_for(engine).model_copy(update={"adapter": name})) for name in several]
    for state in states:
        feed(engine, state, tokens[:10], 0)
    first = engine.forward([Chunk(state, tokens[10:11], 1) for state in states])
    second = engine.forward([Chunk(state, tokens[11:], 1) for state in states])
    for index, (earlier, later) in enumerate(zip(first, second, strict=True)):
        judge.same(np.concatenate([earlier, later]), alone[index], f"adapter {several[index]} in a batch", batched=True)
    for state in states:
        state.close()


def _check_chunks(engine: Engine, judge: Judge, tokens: list[int], expected: Logits) -> None:
    """Check that chunking, rewinding and early exits do not change the logits."""
    state = engine.start(storage_for(engine).model_copy(update={"adapter": "one"}))
    for token in tokens[:9]:
        engine.forward([Chunk(state, [token], 0)])
    for leave in (None, *engine.capabilities.exits) if engine.capabilities.max_rewind != 0 else ():
        engine.forward([Chunk(state, [tokens[9]], 1, leave)])
        state.rewind(1)
    judge.same(feed(engine, state, tokens[9:], 2), expected, "an adapter, chunked and rewound")
    state.close()


def _check_segments(engine: Engine, judge: Judge, tokens: list[int], expected: Logits) -> None:
    """Check that a segment is restored only under the adapter with which it was saved."""
    if not engine.capabilities.can_save:
        return
    state = engine.start(storage_for(engine).model_copy(update={"adapter": "one"}))
    feed(engine, state, tokens[:8], 0)
    segment = state.save(0, 8)
    state.close()
    for other in (None, "two"):
        wrong = engine.start(storage_for(engine).model_copy(update={"adapter": other}))
        refused(lambda: wrong.restore(segment), "a segment of another adapter")  # noqa: B023
        wrong.close()
    again = engine.start(storage_for(engine).model_copy(update={"adapter": "one"}))
    again.restore(segment)
    judge.same(feed(engine, again, tokens[8:], 2), expected, "an adapter's segment, restored")
    again.close()
