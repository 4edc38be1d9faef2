"""The conformance suite of engines, built in or not. It names the first broken promise.

It uses only the contract of `edgekit.contracts.engine`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from edgekit.contracts.engine import Chunk, Engine, Segment
from edgekit.contracts.feeding import feed
from edgekit.testing.check_adapters import check_adapters  # noqa: F401 - among CHECKS
from edgekit.testing.check_keeping import (  # noqa: F401 - among CHECKS
    check_kept_tokens_depend_on_the_text,
    check_several_spans_leave_at_once,
)
from edgekit.testing.check_states import (  # noqa: F401 - among CHECKS
    check_a_recurrent_part_follows,
    check_cached_keys_are_those_of_the_tokens,
    check_features,
    check_segments_survive_the_disk,
)
from edgekit.testing.judging import CAPACITY, Judge, MakeEngine, opened, refused, require, storage_for, words

EngineCheck = Callable[[Engine, Judge], None]


def check_engine(
    make_engine: MakeEngine,
    *,
    exact: bool,
    tolerance: float,
    exact_batches: bool | None = None,
    memoryless: bool = False,
    sequences: int = 500,
    adapters: tuple[Path, Path] | None = None,
) -> None:
    """Raise AssertionError, naming the broken promise, unless the engine keeps them all.

    Args:
        make_engine: opens a fresh engine.
        exact: require bitwise equal logits, independent of how tokens were chunked, drafted or reused.
        tolerance: otherwise, the allowed difference as a share of the largest logit.
        exact_batches: require bitwise equal logits for different batches too; None: as `exact`.
        memoryless: the model has one layer, so that cached tokens keep no trace of evicted ones.
        sequences: the number of random sequences of operations to try.
        adapters: folders of two different adapters, each of which changes the logits.
    """
    batches = exact if exact_batches is None else exact_batches
    judge = Judge(exact, tolerance, batches, sequences, memoryless, adapters)
    for check in CHECKS.values():
        with opened(make_engine) as engine:
            check(engine, judge)


def check_abilities_are_sane(engine: Engine, judge: Judge) -> None:
    able = engine.capabilities
    require(able.vocabulary > 1 and able.max_states >= 1 and able.max_chunk_tokens >= 1, "an ability is below one")
    require(bool(able.kv_bits), "no cache width is offered")
    require(not judge.exact or able.exact != "never", "judged as exact, yet capabilities.exact is never")
    storage = storage_for(engine)
    state = engine.start(storage)
    require((state.position, state.length) == (0, 0), "a new state is not empty")
    require(state.bytes == engine.state_bytes(storage), f"{state.bytes} bytes, state_bytes said otherwise")
    bigger = engine.state_bytes(storage_for(engine, 2 * CAPACITY))
    require(bigger >= state.bytes, "a larger capacity takes fewer bytes")
    state.close()
    state.close()


def check_logits_have_the_asked_shape(engine: Engine, judge: Judge) -> None:
    """Logits are float32 [num_logits, vocabulary]; position and length count the fed tokens."""
    random = np.random.default_rng(1)
    state = engine.start(storage_for(engine))
    count = min(4, engine.capabilities.max_chunk_tokens)
    tokens = words(engine, random, count)
    nothing = engine.forward([Chunk(state, tokens, 0)])
    require(
        [each.shape for each in nothing] == [(0, engine.capabilities.vocabulary)], "num_logits 0 did not give no rows"
    )
    require((state.position, state.length) == (count, count), "position or length did not count the tokens")
    logits = engine.forward([Chunk(state, tokens, count)])[0]
    require(logits.shape == (count, engine.capabilities.vocabulary), f"{count} rows have shape {logits.shape}")
    require(logits.dtype == np.float32 and bool(np.isfinite(logits).all()), "logits are not finite float32")
    require(engine.forward([]) == [], "a call without chunks gave logits")


def check_chunks_do_not_matter(engine: Engine, judge: Judge) -> None:
    """Cutting tokens into other chunks does not change the logits."""
    random = np.random.default_rng(2)
    tokens = words(engine, random, 24)
    limit = min(8, engine.capabilities.max_chunk_tokens)
    whole = engine.start(storage_for(engine))
    expected = feed(engine, whole, tokens, limit)
    whole.close()
    for trial in range(12):
        state, place, collected = engine.start(storage_for(engine)), 0, []
        while place < len(tokens):
            size = int(random.integers(1, limit + 1))
            piece = tokens[place : place + size]
            num_logits = max(0, min(len(piece), place + len(piece) - (len(tokens) - limit)))
            collected.append(engine.forward([Chunk(state, piece, num_logits)])[0])
            place += len(piece)
        judge.same(np.concatenate(collected), expected, f"chunked, trial {trial}")
        state.close()


def check_hidden_states(engine: Engine, judge: Judge) -> None:
    """Hidden states, if supported, have the right shape and depend neither on chunks nor on calls for logits."""
    width = engine.capabilities.hidden_size
    if width is None:
        return
    random, limit = np.random.default_rng(4), min(6, engine.capabilities.max_chunk_tokens)
    tokens = words(engine, random, limit)
    single = engine.start(storage_for(engine))
    expected = engine.forward([Chunk(single, tokens, limit, hidden=True)])[0]
    single.close()
    are_floats = expected.dtype == np.float32 and bool(np.isfinite(expected).all())
    require(expected.shape == (limit, width) and are_floats, f"hidden states: {expected.dtype} {expected.shape}")
    single, rows = engine.start(storage_for(engine)), []
    for index, token in enumerate(tokens):
        rows.append(engine.forward([Chunk(single, [token], 1, hidden=True)])[0])
        if index == 1 and engine.capabilities.max_rewind != 0:  # a call for logits in between
            single.rewind(1)
            engine.forward([Chunk(single, [token], 1)])
    judge.same(np.concatenate(rows), expected, "hidden states token by token")


def check_batching_does_not_matter(engine: Engine, judge: Judge) -> None:
    """A chunk gives the same logits in a batch as alone; closing one state does not affect the others."""
    random = np.random.default_rng(3)
    limit = min(6, engine.capabilities.max_chunk_tokens)
    num_states = min(3, engine.capabilities.max_states)
    for trial in range(12):
        single = trial % 2 == 1  # the usual decode call: one token of each state
        starts = [words(engine, random, int(random.integers(1, 12))) for _ in range(num_states)]
        sizes = [1 if single else int(random.integers(1, limit + 1)) for _ in range(num_states)]
        nexts = [words(engine, random, size) for size in sizes]
        num_logits = [len(tokens) if trial % 3 else int(random.integers(0, len(tokens) + 1)) for tokens in nexts]
        expected = []
        for first, second, count in zip(starts, nexts, num_logits, strict=True):
            state = engine.start(storage_for(engine))
            feed(engine, state, first, 0)
            expected.append(engine.forward([Chunk(state, second, count)])[0])
            state.close()
        states = [engine.start(storage_for(engine)) for _ in starts]
        for state, first in zip(states, starts, strict=True):
            feed(engine, state, first, 0)
        if num_states > 2:  # another state takes the freed slot
            states.pop(0).close()
            starts, nexts, num_logits, expected = starts[1:], nexts[1:], num_logits[1:], expected[1:]
        order = random.permutation(len(states))
        rows = engine.forward([Chunk(states[i], nexts[i], num_logits[i]) for i in order])
        for i, logits in zip(order, rows, strict=True):
            judge.same(logits, expected[i], f"in a batch, trial {trial}", batched=True)
        for state in states:
            state.close()


def check_no_operation_leaves_a_trace(engine: Engine, judge: Judge) -> None:
    """After any forwards, rewinds, saves, restores and evictions, a state gives the logits of one without them."""
    for seed in range(judge.sequences):
        random = np.random.default_rng([4, seed])
        trace = _RandomTrace(engine, judge, random)
        for _ in range(int(random.integers(2, 9))):
            trace.step()
        trace.compare(f"sequence {seed} ({', '.join(trace.operations)})")


class _RandomTrace:
    """A state under random operations, and the equivalent history, which must give the same logits."""

    def __init__(self, engine: Engine, judge: Judge, random: np.random.Generator) -> None:
        self.engine, self.judge, self.random = engine, judge, random
        self.state = engine.start(storage_for(engine))
        self.plain: list[int | tuple[int, int]] = []  # tokens fed, and evictions in order
        self.since = 0  # tokens fed since the last eviction
        self.evicted = 0
        self.operations: list[str] = []

    @property
    def fed(self) -> list[int]:
        return [event for event in self.plain if isinstance(event, int)]

    def step(self) -> None:
        able, length = self.engine.capabilities, self.state.length
        choices = ["feed", "feed", "rewind"]
        choices += ["evict"] if able.can_evict and length > 4 else []
        can_save = able.can_save and (not self.evicted or able.can_save_evicted)
        choices += ["save"] if can_save and length > 1 else []
        {"feed": self._feed, "rewind": self._rewind, "evict": self._evict, "save": self._save}[
            choices[int(self.random.integers(len(choices)))]
        ]()
        expected = (len(self.fed), len(self.fed) - self.evicted)
        held = (self.state.position, self.state.length)
        require(held == expected, f"{', '.join(self.operations)}: position and length {held}, expected {expected}")

    def _feed(self) -> None:
        room = min(self.engine.capabilities.max_chunk_tokens, 8, CAPACITY - 4 - self.state.length)
        if room > 0:
            tokens = words(self.engine, self.random, int(self.random.integers(1, room + 1)))
            self.engine.forward([Chunk(self.state, tokens, int(self.random.integers(0, len(tokens) + 1)))])
            self.plain += tokens
            self.since += len(tokens)
            self.operations.append(f"feed {len(tokens)}")

    def _rewind(self) -> None:
        limit = self.engine.capabilities.max_rewind
        count = int(self.random.integers(0, min(self.since, self.since if limit is None else limit) + 1))
        self.state.rewind(count)
        self.plain = self.plain[: len(self.plain) - count]
        self.since -= count
        self.operations.append(f"rewind {count}")

    def _evict(self) -> None:
        start = int(self.random.integers(0, self.state.length - 1))
        stop = int(self.random.integers(start + 1, self.state.length))
        self.state.evict(start, stop)
        self.plain.append((start, stop))
        self.since, self.evicted = 0, self.evicted + stop - start
        self.operations.append(f"evict {start}:{stop}")

    def _save(self) -> None:
        """Save everything, restore it into a new state in two segments, and continue with that state.

        After evictions there is one segment.
        """
        length = self.state.length
        middle = int(self.random.integers(0, length + 1))
        if self.evicted:
            whole = self.state.save(0, length)
            require(whole.bytes == self.state.save_bytes(0, length), "save_bytes is not what save takes")
            refused(lambda: whole.split(1), "a segment saved after evictions was split")
            self.state.close()
            self.state = self.engine.start(storage_for(self.engine))
            self.state.restore(whole)
            self.operations.append(f"restore after evicting {self.evicted}")
            return
        first, second = self.state.save(0, length).split(middle)
        require((first.tokens, second.tokens) == (middle, length - middle), "a split lost tokens")
        self.state.close()
        self.state = self.engine.start(storage_for(self.engine))
        segments: list[Segment] = [segment for segment in (first, second) if segment.tokens]
        for segment in segments:
            self.state.restore(segment)
        self.operations.append(f"restore {middle}+{length - middle}")

    def compare(self, what: str) -> None:
        ending = words(self.engine, self.random, 2)
        plain = self.engine.start(storage_for(self.engine)) if self.engine.capabilities.max_states > 1 else None
        logits = feed(self.engine, self.state, ending, 1)
        self.state.close()
        plain = plain or self.engine.start(storage_for(self.engine))
        pending: list[int] = []
        for event in [*self.plain, (0, 0)]:
            if isinstance(event, int):
                pending.append(event)
                continue
            feed(self.engine, plain, pending, 0)
            pending = []
            if event[1]:
                plain.evict(*event)
        self.judge.same(logits, feed(self.engine, plain, ending, 1), what)
        plain.close()


def check_evictions_close_the_gap(engine: Engine, judge: Judge) -> None:
    """Evicting the newest tokens equals a rewind. With one layer, evicting any tokens equals never feeding them.

    A recurrent part still depends on evicted tokens; with one, neither holds.
    """
    if not engine.capabilities.can_evict:
        state = engine.start(storage_for(engine))
        feed(engine, state, [1, 2, 3], 0)
        refused(lambda: state.evict(0, 1), "evict on an engine that says it cannot")
        return
    random = np.random.default_rng(5)
    for trial in range(10 if engine.capabilities.checkpoint_tokens is None else 0):
        tokens, ending = words(engine, random, 20), words(engine, random, 3)
        start = int(random.integers(0, 10))
        stop = 20 if not judge.memoryless else int(random.integers(start + 1, 20))
        state = engine.start(storage_for(engine))
        feed(engine, state, tokens, 0)
        state.evict(start, stop)
        logits = feed(engine, state, ending, 1)
        state.close()
        plain = engine.start(storage_for(engine))
        feed(engine, plain, tokens[:start] + tokens[stop:], 0)
        expected = feed(engine, plain, ending, 1)
        plain.close()
        rounding = Judge(judge.exact and stop == 20, judge.tolerance, False, 0, False)
        rounding.same(logits, expected, f"evict {start}:{stop}, trial {trial}")
    state = engine.start(storage_for(engine))
    feed(engine, state, [1, 2, 3], 0)
    refused(lambda: state.evict(2, 5), "an eviction of tokens that are not held")
    refused(lambda: state.evict(-1, 1), "an eviction before the first token")


def check_limits_are_errors(engine: Engine, judge: Judge) -> None:
    """An engine raises an `EdgekitError` beyond its capacity, chunk size, states or vocabulary."""
    able = engine.capabilities
    base = storage_for(engine)
    refused(lambda: engine.start(base.model_copy(update={"kv_bits": 3})), "cache bits that are not offered")
    refused(lambda: engine.start(base.model_copy(update={"capacity_tokens": 0})), "a capacity of nothing")
    refused(lambda: engine.start(base.model_copy(update={"adapter": "no-such"})), "an adapter that is not loaded")
    bad: dict[str, tuple[list[int], int, int | None]] = {
        "no tokens": ([], 0, None),
        "more rows than tokens": ([1], 2, None),
        "negative rows": ([1], -1, None),
        "a negative token": ([-1], 1, None),
        "a token past the vocabulary": ([able.vocabulary], 1, None),
        "an exit that is not offered": ([1], 1, 10_000),
    }
    if able.max_chunk_tokens < CAPACITY:
        bad["a chunk past the limit"] = ([1] * (able.max_chunk_tokens + 1), 1, None)
    for what, (tokens, num_logits, exit_layer) in bad.items():
        closed = engine.start(base)
        refused(lambda: engine.forward([Chunk(closed, tokens, num_logits, exit_layer)]), what)  # noqa: B023
        refused(lambda: engine.forward([Chunk(closed, [1], 1)]), f"a state used after {what}")  # noqa: B023
    full = engine.start(base)
    feed(engine, full, [1] * CAPACITY, 0)
    refused(lambda: engine.forward([Chunk(full, [1], 1)]), "a token past the capacity")
    state = engine.start(base)
    feed(engine, state, [1, 2, 3], 0)
    refused(lambda: state.rewind(4), "a rewind of more than is held")
    refused(lambda: state.rewind(-1), "a negative rewind")
    state.close()
    refused(lambda: engine.forward([Chunk(state, [1], 1)]), "a closed state")
    states = [engine.start(base) for _ in range(able.max_states)]
    refused(lambda: engine.start(base), "one state too many")
    for one in states:
        one.close()


def check_a_failed_call_closes_only_its_states(engine: Engine, judge: Judge) -> None:
    """A failed call closes its states and frees their capacity; other states are unaffected."""
    able = engine.capabilities
    if able.max_states < 2:
        return
    random = np.random.default_rng(8)
    tokens = words(engine, random, 9)
    plain = engine.start(storage_for(engine))
    expected = feed(engine, plain, tokens, 1)
    plain.close()
    bystander = engine.start(storage_for(engine))
    feed(engine, bystander, tokens[:8], 0)
    for _ in range(3):
        closed = [engine.start(storage_for(engine)) for _ in range(able.max_states - 1)]
        for state in closed:
            feed(engine, state, [1, 2], 0)
        poisoned = [Chunk(state, [able.vocabulary], 1) for state in closed[-1:]]
        refused(lambda: engine.forward([*(Chunk(s, [1], 1) for s in closed[:-1]), *poisoned]), "a bad token")  # noqa: B023
        for state in closed:
            refused(lambda: engine.forward([Chunk(state, [1], 1)]), "a state of a failed call")  # noqa: B023
            state.close()
    judge.same(feed(engine, bystander, tokens[8:], 1), expected, "a bystander of failed calls")


def check_exits_leave_no_trace(engine: Engine, judge: Judge) -> None:
    """Tokens fed with an early exit leave no trace after a rewind."""
    tokens = words(engine, np.random.default_rng(9), 12)
    drafts = 3 if (limit := engine.capabilities.max_rewind) is None else min(3, limit)
    for exit_layer in engine.capabilities.exits if drafts else ():
        plain = engine.start(storage_for(engine))
        expected = feed(engine, plain, tokens, 2)
        plain.close()
        state = engine.start(storage_for(engine))
        feed(engine, state, tokens[:10], 0)
        for drafted in range(drafts):
            num_logits = engine.forward([Chunk(state, [drafted], 1, exit_layer)])[0]
            require(num_logits.shape == (1, engine.capabilities.vocabulary), "an exit gave no row")
        state.rewind(drafts)
        judge.same(feed(engine, state, tokens[10:], 2), expected, f"after exits at layer {exit_layer}")
        state.close()


def check_threads_change_between_calls(engine: Engine, judge: Judge) -> None:
    """Fewer threads give the same logits, and states stay valid; an engine that cannot change threads refuses."""
    most = engine.capabilities.threads
    if most is None:
        refused(lambda: engine.use_threads(1), "use_threads without the ability")
        return
    require(most >= 1, f"capabilities.threads is {most}")
    refused(lambda: engine.use_threads(0), "no threads")
    refused(lambda: engine.use_threads(most + 1), "more threads than capabilities.threads")
    tokens = words(engine, np.random.default_rng(15), 12)
    state = engine.start(storage_for(engine))
    expected = [feed(engine, state, part, 1) for part in (tokens[:8], tokens[8:])]
    state.close()
    state = engine.start(storage_for(engine))
    found = [feed(engine, state, tokens[:8], 1)]
    engine.use_threads(1)
    found.append(feed(engine, state, tokens[8:], 1))
    engine.use_threads(most)
    for rows, others in zip(found, expected, strict=True):
        judge.same(rows, others, "with other threads")
    state.close()


def check_an_interrupted_engine_calls_nothing(engine: Engine, judge: Judge) -> None:
    """Calls after an interruption raise and close their states; the engine still closes."""
    state, tokens = engine.start(storage_for(engine)), words(engine, np.random.default_rng(16), 4)
    feed(engine, state, tokens, 1)
    engine.interrupt()
    engine.interrupt()
    refused(lambda: engine.forward([Chunk(state, tokens, 1)]), "forward on an interrupted engine")
    refused(lambda: state.rewind(1), "a state of an interrupted call")
    engine.close()


def check_a_closed_engine_refuses(engine: Engine, judge: Judge) -> None:
    state = engine.start(storage_for(engine))
    engine.close()
    refused(lambda: engine.start(storage_for(engine)), "start on a closed engine")
    refused(lambda: engine.forward([Chunk(state, [1], 1)]), "forward on a closed engine")
    state.close()


CHECKS: dict[str, EngineCheck] = {
    name.removeprefix("check_"): value
    for name, value in list(globals().items())
    if name.startswith("check_") and name != "check_engine"
}
