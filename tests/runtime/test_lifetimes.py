"""Runtimes that are dropped, forked, pickled or closed in the middle, and clocks that jump."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from process_files import open_files
from runtimes import make_runtime
from speculating import COSTS, draft_model

from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.errors import Cancelled, EdgekitError, RuntimeClosed, Unsupported
from edgekit.runtime import request, scheduler
from edgekit.runtime.async_runtime import AsyncRuntime
from edgekit.runtime.generation.chat_template import ChatTemplate
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.speculation.controller import SpeculationController
from edgekit.runtime.speculation.speculation import Speculation
from edgekit.testing import FakeEngine

if TYPE_CHECKING:
    from edgekit.contracts.engine import Logits
    from edgekit.runtime.reading import Answer

CHAT = [{"role": "user", "content": "the cat"}]


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_dropped_runtime_leaves_no_process_and_no_descriptor() -> None:
    make_runtime().chat(CHAT, max_tokens=1)  # what is loaded once
    gc.collect()
    descriptors, workers = open_files(), []
    for _ in range(5):
        runtime = make_runtime()
        runtime.chat(CHAT, max_tokens=1)
        runtime.generate("a", regex="[ab]", max_tokens=1)
        workers += [runtime.template.process_id, runtime._grammars.process_id]
        gone = weakref.ref(runtime)
        del runtime
        gc.collect()
        assert gone() is None
    assert len(set(workers)) == 10 and not any(is_running(worker) for worker in workers if worker)
    assert open_files() == descriptors


def test_a_stream_dropped_while_another_thread_has_the_lock_is_retired_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_runtime() as runtime:
        streams = [runtime.stream("the cat", max_tokens=50)]
        runtime.step()
        scheduler = runtime._driver._scheduler
        count = scheduler.metrics

        def drop_and_count() -> object:
            streams.clear()  # as the garbage collector may: cancelling finds the lock taken
            gc.collect()
            return count()

        monkeypatch.setattr(scheduler, "metrics", drop_and_count)
        assert runtime.metrics().running == 1
        assert scheduler.metrics().running == 0
        assert runtime.engine.states == []


@pytest.mark.parametrize("kind", [Runtime, AsyncRuntime])
def test_pickling_and_copying_are_refused_with_a_clear_error(kind: type) -> None:
    with make_runtime() as runtime:
        held = runtime if kind is Runtime else AsyncRuntime(runtime)
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(Unsupported, match="cannot be pickled or copied, since it holds an open model"):
                attempt(held)
        with pytest.raises(Unsupported, match="a Stream cannot be pickled"):
            pickle.dumps(runtime.stream("a", max_tokens=1))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_forked_process_is_refused() -> None:
    with make_runtime() as runtime:
        runtime.chat(CHAT, max_tokens=1)
        stream, worker = runtime.stream("the cat", max_tokens=5), runtime.template.process_id
        first = next(stream)
        child = os.fork()
        if child == 0:
            told = 0
            for attempt in (
                lambda: runtime.generate("a", max_tokens=1), lambda: next(stream), runtime.step, runtime.metrics,
                stream.cancel,
            ):  # fmt: skip
                try:
                    attempt()
                except RuntimeClosed as error:
                    told += f"open the artifact again in process {os.getpid()}" in str(error)
            runtime.close()
            runtime.template.close()
            os._exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        assert worker is not None and is_running(worker), "the child has not killed its parent's worker"
        assert first.text + "".join(piece.text for piece in stream) == runtime.generate("the cat", max_tokens=5).text


def test_clock_jumps_do_not_change_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def order() -> list[str]:
        ended = []
        with make_runtime(sequences=2) as runtime:
            streams = {
                f"{place}": runtime.stream("the cat", max_tokens=4 + place, priority=place % 3) for place in range(6)
            }
            while len(ended) < 6:
                runtime.step()
                for name, stream in streams.items():
                    if name not in ended and any(piece.finish_reason for piece in stream.poll()):
                        ended.append(name)
        return ended

    usual = order()
    times = iter([0.0, 1e9, -1e9, 1e18] * 10_000)
    monkeypatch.setattr(time, "time", lambda: next(times))
    monkeypatch.setattr(time, "time_ns", lambda: int(next(times)))
    assert order() == usual


@pytest.mark.parametrize("jump", [1e9, -1e9, 0.0])
def test_a_leap_of_the_clock_is_worth_one_step_of_priority_at_most(
    jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1e6]
    for module in (request, scheduler):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    with make_runtime(sequences=1) as runtime:
        running = runtime.submit("a", max_tokens=2)
        runtime.step()
        early = runtime.submit("the cat", max_tokens=1)
        now[0] += jump
        late = [runtime.submit("the cat", max_tokens=1, priority=priority) for priority in (0, 2)]
        first = None
        while first is None:
            runtime.step()
            running.poll()
            first = next((place for place, each in enumerate([early, *late]) if each.generated_tokens), None)
    assert first == 2, "two steps are more than a leap"


@pytest.mark.parametrize("work", ["a chat template", "a grammar"])
def test_closing_ends_a_worker_in_the_middle_of_its_answer(work: str) -> None:
    """Closing must not wait for the answer's limit, here ten minutes."""
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate({"default": endless}, {}, limit_s=600)
    runtime, ended = make_runtime(), list[type]()
    grammars = runtime._grammars
    grammars._worker._limit_s = 600

    def ask() -> None:
        try:
            if work == "a grammar":
                with patch.object(grammars._worker, "_program", slow_worker):
                    grammars.compile("regex", "[ab]*")
            else:
                template.render(CHAT)
        except EdgekitError as error:
            ended.append(type(error))

    slow_worker = Path(__file__).parents[1] / "helpers" / "slow_worker.py"
    worker = grammars._worker if work == "a grammar" else template._worker
    thread = Thread(target=ask, daemon=True)
    thread.start()
    while not worker._greeted:
        assert thread.is_alive()
        time.sleep(0.01)
    began = time.monotonic()
    runtime.close()
    template.close()
    thread.join(60)
    assert not thread.is_alive() and ended == [RuntimeClosed]
    assert time.monotonic() - began < 20, "far less than a second on an idle machine"
    assert worker.process_id is None


def test_closing_in_the_middle_of_anything_ends_within_a_second() -> None:
    runtime = make_runtime(sequences=4)
    ended = []

    def ask(number: int) -> None:
        try:
            while True:
                if number % 3 == 0:
                    runtime.chat(CHAT, max_tokens=20)
                elif number % 3 == 1:
                    runtime.generate("the cat", regex=f"[ab]{{{number + 3},40}}", max_tokens=20)
                else:
                    runtime.score("the cat", [" sat", " on"])
        except (RuntimeClosed, Cancelled):  # scores have no part that could be returned
            ended.append(number)

    threads = [Thread(target=ask, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    began = time.monotonic()
    runtime.close()
    took = time.monotonic() - began
    for thread in threads:
        thread.join(10)
    assert sorted(ended) == list(range(6))
    assert took < 5, "a second on an idle machine"


class BusyEngine(FakeEngine):
    """An engine whose calls last until they are interrupted, after the first `quick_calls`."""

    def __init__(self, quick_calls: int, **options: Any) -> None:
        super().__init__(**options)
        self.quick_calls, self.is_busy, self.is_stopped = quick_calls, Event(), Event()

    def forward(self, chunks: Sequence[Chunk]) -> list[Logits]:
        if self.forwards >= self.quick_calls:
            self.is_busy.set()
            assert self.is_stopped.wait(60)
        return super().forward(chunks)

    def interrupt(self) -> None:
        super().interrupt()
        self.is_stopped.set()


@pytest.mark.parametrize("requests", [1, 3])
def test_closing_interrupts_a_running_call_and_requests_end_as_cancelled(requests: int) -> None:
    engine = BusyEngine(2)
    runtime = make_runtime(engine, sequences=4)
    streams = [runtime.submit("the cat", max_tokens=20) for _ in range(requests)]
    answers: list[Answer] = []
    thread = Thread(target=lambda: answers.append(streams[0].answer()), daemon=True)
    thread.start()
    assert engine.is_busy.wait(60)
    runtime.close()
    thread.join(60)
    assert [answer.finish_reason for answer in answers] == ["cancelled"]
    assert [stream.answer().finish_reason for stream in streams[1:]] == ["cancelled"] * (requests - 1)
    assert engine.closed and not engine.states


def test_work_between_steps_that_is_interrupted_says_that_the_runtime_was_closed() -> None:
    engine = BusyEngine(0)
    runtime = make_runtime(engine)
    failed: list[BaseException] = []

    def work() -> None:
        state = engine.start(KVCacheConfig(capacity_tokens=8, kv_bits=16))
        engine.forward([Chunk(state, [1], 1)])

    def ask() -> None:
        try:
            runtime._driver.exclusively(work)
        except EdgekitError as error:
            failed.append(error)

    thread = Thread(target=ask, daemon=True)
    thread.start()
    assert engine.is_busy.wait(60)
    runtime.close()
    thread.join(60)
    assert [str(error) for error in failed] == ["this runtime was closed during the call; open the artifact again"]
    assert isinstance(failed[0], RuntimeClosed)


def test_an_asynchronous_runtime_interrupts_a_running_call() -> None:
    async def main() -> str | None:
        engine = BusyEngine(2)
        held = AsyncRuntime(make_runtime(engine))
        stream = await held.submit("the cat", max_tokens=20)
        await asyncio.to_thread(engine.is_busy.wait, 60)
        await held.close()
        return (await stream.answer()).finish_reason

    assert asyncio.run(asyncio.wait_for(main(), 60)) == "cancelled"


def test_closing_interrupts_a_draft_model() -> None:
    draft = BusyEngine(1)
    storage = KVCacheConfig(capacity_tokens=512, kv_bits=16)
    method = draft_model(draft, storage, draft.capabilities.vocabulary)
    runtime = make_runtime(drafting=Speculation([method], SpeculationController(COSTS)))
    stream = runtime.submit("the cat sat on the mat", max_tokens=40)
    answers: list[Answer] = []
    thread = Thread(target=lambda: answers.append(stream.answer()), daemon=True)
    thread.start()
    assert draft.is_busy.wait(60)
    runtime.close()
    thread.join(60)
    assert [answer.finish_reason for answer in answers] == ["cancelled"]
    assert draft.closed
