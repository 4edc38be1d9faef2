"""Many requests on one engine: none starves, memory is never exceeded, all is released, batching changes no text."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import Sequence
from functools import lru_cache
from threading import Condition, Event, Thread
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from runtimes import make_runtime
from speculating import SOURCES

import edgekit
from edgekit.common.subprocesses import WORKER_BYTES
from edgekit.common.units import MIB
from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.errors import DoesNotFit, InvalidInput
from edgekit.runtime import scheduler
from edgekit.runtime.generation.template_worker import RENDER_BYTES
from edgekit.runtime.memory.budget import MemoryBudget
from edgekit.runtime.stream import Stream
from edgekit.testing import FakeEngine
from edgekit.testing.drafting import Drafting, ReplayDrafter

SIZE = 300
CONTEXT = 96
PROMPTS = [[token] * 3 + [7, 8] * length for token in (1, 2) for length in (1, 7, 30)]


def one_state() -> int:
    return FakeEngine(vocabulary=SIZE).state_bytes(KVCacheConfig(capacity_tokens=CONTEXT, kv_bits=16))


@lru_cache
def alone(which: int, tokens: int) -> tuple[int, ...]:
    with make_runtime(FakeEngine(vocabulary=SIZE), context=CONTEXT) as runtime:
        return runtime.complete(PROMPTS[which], max_tokens=tokens).tokens


def alone_without_end(which: int, tokens: int) -> tuple[int, ...]:
    with make_runtime(FakeEngine(vocabulary=SIZE), context=CONTEXT) as runtime:
        return runtime.complete(PROMPTS[which], max_tokens=tokens, ignore_eos=True).tokens


class Scheduler(RuleBasedStateMachine):
    """Requests come, advance and are cancelled; the oracle of each is its answer when it is alone."""

    @initialize(states=st.sampled_from([1.0, 2.5, 4.0]), prefixes=st.sampled_from([0, 1500, 1 << 20]))
    def open(self, states: float, prefixes: int) -> None:
        self.engine = FakeEngine(vocabulary=SIZE, max_states=3)
        self.budget = MemoryBudget(int(states * one_state()))
        self.runtime = make_runtime(
            self.engine, context=CONTEXT, sequences=3, budget=self.budget, prefix_bytes=prefixes
        )
        self.asked: list[tuple[Stream, int, int]] = []
        self.cancelled: dict[int, int] = {}  # request, and steps since it was cancelled
        self.said: list[list[int]] = []

    @rule(which=st.integers(0, len(PROMPTS) - 1), tokens=st.integers(1, 20), priority=st.integers(-2, 2))
    def submit(self, which: int, tokens: int, priority: int) -> None:
        stream = self.runtime.submit(PROMPTS[which], max_tokens=tokens, priority=priority)
        self.asked.append((stream, which, tokens))
        self.said.append([])

    @rule(steps=st.integers(1, 6))
    def drive(self, steps: int) -> None:
        for _ in range(steps):
            self.runtime.step()
            self._read()
            self.cancelled = {place: count + 1 for place, count in self.cancelled.items()}
            held = [place for place, (stream, _, _) in enumerate(self.asked) if stream.processed_tokens]
            assert not [place for place, count in self.cancelled.items() if count >= 2 and place in held]

    @rule(which=st.integers(0, 50))
    def cancel(self, which: int) -> None:
        if self.asked:
            self.asked[which % len(self.asked)][0].cancel()
            self.cancelled.setdefault(which % len(self.asked), 0)

    @invariant()
    def memory_is_never_exceeded_and_states_are_those_that_run(self) -> None:
        if not hasattr(self, "engine"):
            return
        assert sum(self.budget.taken.values()) <= (self.budget.allowed_bytes or 0)
        found = self.runtime.metrics()
        assert self.budget.taken.get("states", 0) == sum(state.bytes for state in self.engine.states)
        assert found.running <= 3 and found.states_bytes >= len(self.engine.states) * one_state()
        assert found.kv_tokens <= found.kv_capacity_tokens

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        # Every step advances somebody, so what is left bounds how many it takes.
        for _ in range(sum(len(PROMPTS[which]) + tokens + 2 for _, which, tokens in self.asked)):
            self.runtime.step()
            self._read()
        found = self.runtime.metrics()
        assert (found.running, found.waiting, found.requests) == (0, 0, len(self.asked))
        assert self.budget.taken.get("states", 0) == 0 and self.engine.states == []
        for place, (said, (_, which, tokens)) in enumerate(zip(self.said, self.asked, strict=True)):
            expected = alone(which, tokens)
            assert tuple(said) == (expected[: len(said)] if place in self.cancelled else expected)
        self.runtime.close()
        assert self.engine.closed

    def _read(self) -> None:
        for (stream, _, _), said in zip(self.asked, self.said, strict=True):
            for piece in stream.poll():
                said.extend(piece.tokens)


TestScheduler = Scheduler.TestCase
TestScheduler.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_low_priority_request_is_not_starved(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(scheduler, "perf_counter", lambda: now[0])
    with make_runtime(FakeEngine(vocabulary=SIZE), context=CONTEXT, sequences=1) as runtime:
        running = runtime.submit([1], max_tokens=2, priority=5)
        patient = runtime.submit([2], max_tokens=2)
        newcomers = []
        for _ in range(300):
            now[0] += 1
            newcomers.append(runtime.submit([3], max_tokens=1, priority=5))
            runtime.step()
            if patient.generated_tokens:
                break
        assert running.poll()
        assert 5 * scheduler.PRIORITY_S <= now[0] <= 5 * scheduler.PRIORITY_S + 8


def test_prefills_take_turns() -> None:
    with make_runtime(FakeEngine(vocabulary=SIZE), chunk_tokens=8, sequences=3) as runtime:
        long = runtime.submit([1] * 200, max_tokens=1)
        for _ in range(3):
            runtime.step()
        short = runtime.submit([2] * 6, max_tokens=2)
        for _ in range(3):
            runtime.step()
        assert short.generated_tokens > 0 and long.generated_tokens == 0
        assert len(long.answer().tokens) == 1


def test_decoding_waits_at_most_one_prefill_chunk() -> None:
    class Counting(FakeEngine):
        most = 0

        def forward(self, chunks: Any) -> Any:
            self.most = max(self.most, sum(len(chunk.tokens) for chunk in chunks))
            return super().forward(chunks)

    engine = Counting(vocabulary=SIZE)
    with make_runtime(engine, chunk_tokens=16, sequences=4) as runtime:
        writing = [runtime.submit([token], max_tokens=40) for token in (1, 2)]
        runtime.step()
        reading = [runtime.submit([token] * 300, max_tokens=1) for token in (3, 4)]
        before = [stream.generated_tokens for stream in writing]
        for step in range(1, 30):
            runtime.step()
            assert [stream.generated_tokens for stream in writing] == [count + step for count in before]
        assert engine.most <= 16 + 2
        assert all(stream.processed_tokens > 200 for stream in reading)


def test_each_request_of_a_batch_has_its_own_cache_limits() -> None:
    wishes: list[dict[str, Any]] = [
        {},
        {"window": 24, "sinks": 2},
        {"context": 40},
        {"window": 48},
        {"drafting": False},
    ]
    prompt, tokens = [5, 6, 7] * 6, 60
    drafting = Drafting(lambda prompt: ReplayDrafter([*prompt] * 9, wrong_every=3, wrong_token=7), 3)

    def alone(wish: dict[str, Any]) -> tuple[int, ...]:
        opening = {key: wish[key] for key in wish.keys() & {"window", "sinks", "context"}}
        with make_runtime(FakeEngine(vocabulary=SIZE), **{"context": CONTEXT, **opening}) as runtime:
            return runtime.complete(prompt, max_tokens=tokens).tokens

    with make_runtime(
        FakeEngine(vocabulary=SIZE), context=CONTEXT, sequences=3, prefix_bytes=1 << 20, drafting=drafting
    ) as runtime:
        streams = [runtime.submit(prompt, max_tokens=tokens, **wish) for wish in wishes]
        answers = [stream.answer() for stream in streams]
        assert [answer.tokens for answer in answers] == [alone(wish) for wish in wishes]
        assert [answer.timings.proposed > 0 for answer in answers] == [True, True, True, True, False]
        assert len(answers[2].tokens) == 40 - len(prompt) and runtime.metrics().evictions > 3
        for wish in ({"window": CONTEXT + 1}, {"context": 9, "window": 9}, {"sinks": 2}, {"window": 1}):
            with pytest.raises(InvalidInput):
                runtime.submit(prompt, **wish)


@pytest.mark.parametrize("way", ["ngram", "early-exit", "model"])
def test_a_request_takes_the_drafter_that_it_asks_for(way: str) -> None:
    engine, storage = FakeEngine(vocabulary=SIZE), KVCacheConfig(capacity_tokens=CONTEXT, kv_bits=16)
    source = SOURCES["auto"](engine, FakeEngine(vocabulary=SIZE), storage, [])
    with make_runtime(engine, context=CONTEXT, drafting=source) as runtime:
        answer = runtime.complete(PROMPTS[1], max_tokens=30, drafting=way)
        found = runtime.speculation()
        assert answer.tokens == alone(1, 30)
        proposed = [one.name for one in found.proposals if one.proposed]
        assert proposed == [name for name in proposed if name.startswith(way.replace("-", " "))]
        assert proposed or way == "ngram"
        with pytest.raises(InvalidInput, match="drafting"):
            runtime.complete(PROMPTS[1], drafting="guessing")
    source = SOURCES["adapting prompt lookup"](FakeEngine(vocabulary=SIZE), engine, storage, [])
    with make_runtime(FakeEngine(vocabulary=SIZE), drafting=source) as runtime:
        assert len(runtime.complete(PROMPTS[1], max_tokens=3, drafting="ngram").tokens) == 3
        with pytest.raises(InvalidInput, match="without model; it has ngram"):
            runtime.complete(PROMPTS[1], drafting="model")
    with make_runtime() as runtime, pytest.raises(InvalidInput, match="opened without ngram; open it with `draft`"):
        runtime.complete(PROMPTS[1], drafting="ngram")


def test_metrics_add_up() -> None:
    with make_runtime(FakeEngine(vocabulary=SIZE), context=CONTEXT, prefix_bytes=1 << 20) as runtime:
        for _ in range(2):
            for which in range(len(PROMPTS)):
                runtime.complete(PROMPTS[which], max_tokens=5)
        found = runtime.metrics()
        assert found.prompt_tokens == 2 * sum(map(len, PROMPTS)) == found.prefix_asked_tokens
        assert found.cached_tokens == found.prefix_hit_tokens >= sum(len(prompt) - 1 for prompt in PROMPTS)
        assert found.prefix_hit_rate == found.prefix_hit_tokens / found.prefix_asked_tokens
        assert found.prefix_queries == 2 * len(PROMPTS) and found.occupancy is None
        assert found.queue_s >= 0 and found.prefill_s > 0 and found.decode_s > 0
        stream = runtime.submit(PROMPTS[0], max_tokens=5)
        runtime.step()
        assert runtime.metrics().occupancy == stream.processed_tokens / CONTEXT


def test_answers_that_nobody_reads_hold_new_requests_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request always runs, so a reader may begin with the last answer."""
    monkeypatch.setattr(scheduler, "UNREAD_SPARE_BYTES", 0)
    budget = MemoryBudget(3 * one_state() + 2000)
    with make_runtime(FakeEngine(vocabulary=SIZE), context=CONTEXT, sequences=3, budget=budget) as runtime:
        unread = [runtime.submit(PROMPTS[which], max_tokens=20, ignore_eos=True) for which in range(2)]
        while runtime.metrics().running or runtime.metrics().waiting:
            runtime.step()
        assert runtime.metrics().unread_bytes > 2000
        later = [runtime.submit(PROMPTS[which], max_tokens=20, ignore_eos=True) for which in (2, 3, 4)]
        runtime.step()
        assert (runtime.metrics().running, runtime.metrics().waiting) == (2, 1)
        assert [len(stream.answer().tokens) for stream in (*reversed(later), *unread)] == [20] * 5
        assert runtime.metrics().unread_bytes == 0


def test_an_unread_answer_waits_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "UNREAD_SPARE_BYTES", 0)
    budget = MemoryBudget(2 * one_state() + 500)
    with make_runtime(FakeEngine(vocabulary=SIZE), context=CONTEXT, sequences=2, budget=budget) as runtime:
        unread = runtime.submit(PROMPTS[0], max_tokens=60, ignore_eos=True)
        while runtime.metrics().unread_bytes < 1000:
            runtime.step()
        before = unread.generated_tokens
        for _ in range(3):  # one after the other, so that one always runs
            assert len(runtime.complete(PROMPTS[1], max_tokens=20, ignore_eos=True).tokens) == 20
        assert unread.generated_tokens == before and runtime.metrics().running == 1
        runtime.step()
        assert unread.generated_tokens == before + 1  # nobody else needs the memory
        assert unread.answer().tokens == tuple(alone_without_end(0, 60))


def test_pieces_of_an_async_stream_are_counted_until_they_are_read() -> None:
    async def main() -> None:
        runtime = make_runtime(FakeEngine(vocabulary=SIZE), context=CONTEXT, sequences=2)
        async with edgekit.AsyncRuntime(runtime) as asynchronous:
            stream = await asynchronous.submit(PROMPTS[0], max_tokens=50, ignore_eos=True)
            while runtime.metrics().running or runtime.metrics().waiting:
                await asyncio.sleep(0.001)
            counted = [runtime.metrics().unread_bytes]
            async for _ in stream:
                counted.append(runtime.metrics().unread_bytes)
            assert counted[0] > 5000 and counted == sorted(counted, reverse=True) and counted[-1] == 0

    asyncio.run(main())


def test_waiting_requests_are_counted_and_refused_where_memory_is_short() -> None:
    budget = MemoryBudget(one_state() + MIB)
    with make_runtime(FakeEngine(vocabulary=SIZE), context=CONTEXT, budget=budget) as runtime:
        running = runtime.submit(PROMPTS[0], max_tokens=5)
        runtime.step()
        waiting = [runtime.submit(PROMPTS[1], max_tokens=5)]
        while runtime.metrics().queued_bytes < MIB + budget.free_bytes - 10_000:
            waiting.append(runtime.submit(PROMPTS[1], max_tokens=5))
        waiting.append(runtime.submit(PROMPTS[1], max_tokens=5))
        with pytest.raises(DoesNotFit, match=r"requests wait.*memory for one more is not free"):
            runtime.submit(PROMPTS[1], max_tokens=5)
        size = runtime.metrics().queued_bytes
        assert MIB < size < 3 * MIB and runtime.metrics().waiting == len(waiting)
        running.close()
        for stream in waiting[1:]:
            stream.cancel()
        assert runtime.submit(PROMPTS[2], max_tokens=5).answer().tokens == tuple(alone(2, 5))
        assert waiting[0].answer().tokens == tuple(alone(1, 5)) and runtime.metrics().queued_bytes == 0


def test_the_size_of_a_waiting_request_is_about_that_which_python_takes() -> None:
    prompt = [each % SIZE for each in range(CONTEXT // 2)]
    with make_runtime(FakeEngine(vocabulary=SIZE), context=CONTEXT) as runtime:
        runtime.submit(prompt)
        tracemalloc.start()
        try:
            waiting = [runtime.submit(prompt, max_tokens=5) for _ in range(1000)]
            measured, counted = tracemalloc.get_traced_memory()[0], runtime.metrics().queued_bytes
        finally:
            tracemalloc.stop()
        assert 0.6 * counted < measured < 1.1 * counted, (measured / len(waiting), counted / len(waiting))


@pytest.mark.parametrize("spare", [0, 5 << 20, 64 << 20])
def test_the_worker_of_chats_takes_what_is_free_with_the_first_chat(spare: int) -> None:
    budget = MemoryBudget(2 * one_state() + spare)
    with make_runtime(FakeEngine(vocabulary=SIZE), context=CONTEXT, sequences=2, budget=budget) as runtime:
        assert runtime.complete(PROMPTS[0], max_tokens=2).tokens and "workers" not in budget.taken
        for _ in range(2):
            runtime.render([{"role": "user", "content": "Hi"}])
            assert budget.taken["workers"] == min(spare, WORKER_BYTES + RENDER_BYTES)
        assert len([runtime.submit(PROMPTS[0], max_tokens=2) for _ in range(2)]) == 2


def test_unread_bytes_are_about_those_that_python_takes() -> None:
    with make_runtime(FakeEngine(vocabulary=SIZE), context=4096) as runtime:
        for logprobs in (None, 4):
            options: dict[str, Any] = {} if logprobs is None else {"logprobs": logprobs}
            stream = runtime.submit(PROMPTS[0], max_tokens=1000, ignore_eos=True, **options)
            for _ in range(10):
                runtime.step()
            tracemalloc.start()
            before = runtime.metrics().unread_bytes
            for _ in range(500):
                runtime.step()
            measured, counted = tracemalloc.get_traced_memory()[0], runtime.metrics().unread_bytes - before
            tracemalloc.stop()
            stream.cancel()
            assert 0.5 * measured < counted < 2 * measured, (measured, counted)


@pytest.mark.parametrize("again", range(8))
def test_work_between_steps_comes_before_steps_that_wait_already(again: int) -> None:
    """A thread that steps takes the lock again at once, so others might wait for seconds."""
    happened, may_go_on = list[str](), Event()

    class Held(FakeEngine):
        def forward(self, chunks: Sequence[Chunk]) -> Any:
            happened.append("step")
            may_go_on.wait(60)
            return super().forward(chunks)

    def waits(thread: Thread, condition: Condition) -> None:
        waiting = len(condition._waiters)  # type: ignore[attr-defined]
        thread.start()
        while len(condition._waiters) == waiting:  # type: ignore[attr-defined]
            time.sleep(0.001)

    with make_runtime(Held(vocabulary=SIZE), context=CONTEXT) as runtime:
        runtime.submit(PROMPTS[0], max_tokens=20, ignore_eos=True)
        stream, condition = runtime.submit(PROMPTS[1], max_tokens=20, ignore_eos=True), runtime._driver._changed
        running, later = Thread(target=runtime.step), Thread(target=runtime.step)
        between = Thread(target=lambda: runtime._driver.exclusively(lambda: happened.append("between")))
        running.start()
        while not happened:
            time.sleep(0.001)
        waits(later, condition)
        waits(between, condition)
        may_go_on.set()
        for thread in (running, later, between):
            thread.join(60)
        assert happened == ["step", "between", "step"]
        assert stream.answer().tokens == tuple(alone_without_end(1, 20))
