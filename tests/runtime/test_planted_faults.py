"""Whatever raises while requests are queued, run and end: nothing waits for ever, and the memory budget is whole."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

import pytest
import tiny_models
from runtimes import make_runtime

import edgekit
import edgekit.runtime
from edgekit.common.units import MIB
from edgekit.errors import DoesNotFit, EdgekitError, RuntimeClosed, Unsupported
from edgekit.runtime.async_runtime import AsyncRuntime
from edgekit.runtime.guard import CrashGuard
from edgekit.runtime.memory.budget import MemoryBudget
from edgekit.runtime.runtime import Runtime
from edgekit.testing import FakeEngine, fake_artifact

PROMPT = "the cat sat on the mat"
SHORT_S = 20.0  # far more than an answer takes, and far less than for ever

RUNTIME = str(Path(edgekit.runtime.__file__).parent)
# The interpreter reports errors of finalizers instead of raising them, and calls those of objects without attributes;
# nothing can guard the guards.
_LEFT_OUT = {
    "Stream.__del__",
    "AsyncStream.__del__",
    "Stream.__init__",
    "AsyncStream.__init__",
    "Driver.stop_driving",
    "AsyncRuntime._run",
}
Places = set[tuple[CodeType, int]]


class PlantedFault(Exception):
    """Stands for any bug, full disk or lack of memory."""


class _Tracer:
    """Raises once, at the first call or line that is not in `passed`; adds to it each place that it comes by."""

    def __init__(self, event: Literal["call", "line"], passed: Places, every: int) -> None:
        self._event, self._passed, self._every = event, passed, every
        self.raised_at: str | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if self.raised_at is not None or not code.co_filename.startswith(RUNTIME) or code.co_qualname in _LEFT_OUT:
            return None
        place = (code, frame.f_lineno if self._event == "line" else 0)
        if event == self._event and place not in self._passed:
            self._passed.add(place)
            if len(self._passed) % self._every:
                return self if self._event == "line" else None
            self.raised_at = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
            raise PlantedFault(self.raised_at)
        return self if self._event == "line" else None


@contextmanager
def fault_at_next(
    event: Literal["call", "line"], passed: Places, *, in_new_threads: bool = False, every: int = 1
) -> Iterator[_Tracer]:
    """Raise a fault at the first (`every`-th) place that is not in `passed`, in this thread or in new ones."""
    tracer = _Tracer(event, passed, every)
    trace = threading.settrace if in_new_threads else sys.settrace
    trace(tracer)
    try:
        yield tracer
    finally:
        trace(None)  # type: ignore[arg-type]


@pytest.fixture
def _unlogged() -> Iterator[None]:
    """Log nothing: pytest keeps logged errors, and with them the frames that hold streams."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def runtime_with_prefixes() -> Runtime:
    budget = MemoryBudget(16 * MIB)
    return make_runtime(sequences=2, budget=budget, prefix_bytes=MIB, context=256, eos=frozenset())


@pytest.fixture(scope="module", params=["fake", pytest.param("onnx", marks=[pytest.mark.onnx, pytest.mark.quantize])])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Runtime]:
    """Opens a runtime over the fake engine, or over onnxruntime."""
    if request.param == "fake":
        return runtime_with_prefixes
    folder = tmp_path_factory.mktemp("onnx")
    artifact = tiny_models.artifact_of(tiny_models.write_tiny(folder / "tiny", layers=1), folder / "a.edgekit")
    return lambda: edgekit.open(artifact, prefixes="1MiB", sequences=2, memory="2GiB", draft="off")


def everything(runtime: Runtime) -> None:
    """Queue, run, stop, cancel and pin requests of every kind."""
    streams = runtime.submit_several(PROMPT, 3, max_tokens=4, temperature=1.0)
    next(streams[0])
    streams[1].cancel()
    runtime.embed([PROMPT, "a"], pooling="mean")
    runtime.score(PROMPT, [" on", " the mat"])
    runtime.generate(PROMPT, max_tokens=3, stop="cat", window=16)
    streams[2].answer()
    with runtime.pin(PROMPT):
        pass


def states_of(runtime: Runtime) -> list[object]:
    """What the engine holds for requests."""
    return list(runtime.engine.states)  # type: ignore[attr-defined] # every engine of ours has them


def assert_works(runtime: Runtime, fault: str) -> None:
    """A short request answers, nothing waits, and no state or budget is held."""
    metrics = runtime.metrics()
    if metrics.running or metrics.waiting or metrics.queued_bytes:
        gc.collect()  # an error that was raised refers to the frames with the streams, which refer to the error
    assert len(runtime.generate("the cat", max_tokens=2).tokens) == 2, fault
    metrics = runtime.metrics()
    assert (metrics.waiting, metrics.running, metrics.queued_bytes) == (0, 0, 0), fault
    assert states_of(runtime) == [], fault
    taken, prefixes = runtime._budget.taken, runtime._prefixes
    assert taken.get("states", 0) == 0, fault
    assert prefixes is not None and taken.get("prefixes", 0) == prefixes.taken_bytes, fault


@pytest.mark.usefixtures("_unlogged")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of finalizers that meet the fault
@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.long)])
def test_a_fault_at_any_call_leaves_nothing_behind(opened: Callable[[], Runtime], every: int) -> None:
    passed: Places = set()
    count = 0
    while True:
        runtime = opened()
        expected = (PlantedFault, EdgekitError, KeyError, AssertionError)
        with fault_at_next("call", passed, every=every) as fault, suppress(*expected):
            everything(runtime)
        if fault.raised_at is None:
            break
        count += 1
        assert_works(runtime, str(fault.raised_at))
        runtime.close()
    assert count > 150 // every


def test_a_fault_at_any_call_of_closing_still_closes(opened: Callable[[], Runtime]) -> None:
    passed: Places = set()
    while True:
        runtime = opened()
        stream = runtime.submit(PROMPT, max_tokens=5)
        next(stream)
        with fault_at_next("call", passed) as fault, suppress(PlantedFault):
            runtime.close()
        runtime.close()
        with pytest.raises(RuntimeClosed):
            runtime.generate("a", max_tokens=1)
        assert states_of(runtime) == [], fault.raised_at
        if fault.raised_at is None:
            break


def answered(runtime: AsyncRuntime) -> str:
    """Ask a runtime in an event loop; whatever happens, the caller must be told in time."""

    async def ask() -> str:
        try:
            async with asyncio.timeout(SHORT_S):
                await runtime.generate(PROMPT, max_tokens=1)  # its first piece is its last one too
                return (await runtime.generate(PROMPT, max_tokens=3)).finish_reason
        except Exception as error:
            return type(error).__name__

    return asyncio.run(ask())


@pytest.mark.usefixtures("_unlogged")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_fault_at_any_line_of_the_thread_is_told_to_every_caller(opened: Callable[[], Runtime]) -> None:
    passed: Places = set()
    told, count = set(), 0
    while True:
        runtime = AsyncRuntime(opened())
        with fault_at_next("line", passed, in_new_threads=True) as fault:
            told.add(answered(runtime))
        assert "TimeoutError" not in told, fault.raised_at
        if fault.raised_at is None:
            asyncio.run(runtime.close())
            break
        count += 1
        assert answered(runtime) != "TimeoutError", fault.raised_at  # it goes on, or says why it does not
        asyncio.run(runtime.close())
    assert count > 100


QUEUES: list[Callable[[Runtime], Any]] = [
    lambda runtime: runtime.submit_several(PROMPT, 400, max_tokens=2),
    lambda runtime: runtime.submit_score(PROMPT, [" on"] * 200),
    lambda runtime: runtime.submit_embed([PROMPT * 20] * 200, pooling="mean"),
]


@pytest.mark.parametrize("queue", QUEUES, ids=["answers", "scores", "embeddings"])
def test_a_batch_is_queued_as_a_whole_or_not_at_all(queue: Callable[[Runtime], Any]) -> None:
    engine = FakeEngine(vocabulary=300, max_states=1, max_rewind=2)
    state = engine.state_bytes(make_runtime(context=256).kv_config)
    budget = MemoryBudget(state + 4096)
    with make_runtime(engine, sequences=1, budget=budget, context=256) as runtime:
        running = runtime.submit(PROMPT, max_tokens=30)
        next(running)
        waiting = []
        with suppress(DoesNotFit):
            while True:
                waiting.append(queue(runtime))
        before = runtime.metrics().waiting
        with pytest.raises(DoesNotFit, match=r"requests wait, .* submit it when some have ended"):
            queue(runtime)
        assert runtime.metrics().waiting == before
        for each in waiting:
            for stream in each if isinstance(each, list) else [each]:
                stream.cancel()
        running.cancel()
        assert len(runtime.generate("the cat", max_tokens=2).tokens) == 2
        assert runtime.metrics().waiting == 0


def test_more_texts_than_the_queue_holds_are_read_group_by_group() -> None:
    engine = FakeEngine(vocabulary=300, max_states=1)
    budget = MemoryBudget(engine.state_bytes(make_runtime(context=256).kv_config) + 4096)
    with make_runtime(engine, sequences=1, budget=budget, context=256) as runtime:
        vectors = runtime.embed(["the cat"] * 500, pooling="mean")
        assert vectors.shape[0] == 500 and (vectors == vectors[0]).all()

        async def embed() -> Any:
            async with AsyncRuntime(runtime) as same:
                return await same.embed(["the cat"] * 500, pooling="mean")

        assert (asyncio.run(embed()) == vectors).all()


def test_a_guard_that_cannot_be_written_is_told_once_and_fails_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = fake_artifact(tmp_path / "artifact", files={"model.bin": b"weights"})
    folder = tmp_path / "guards"
    guard = CrashGuard(folder / "guard.json", artifact.folder)
    folder.write_text("a file where the folder should be")
    guard.begin()
    guard.opened()
    guard.before_step()
    guard.after_step(20, True)
    assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1
    assert any("cannot be written" in note for note in guard.notes)


def test_a_watcher_that_fails_is_dropped_and_the_answer_goes_on() -> None:
    class Watcher:
        calls = 0

        def before_step(self) -> None:
            self.calls += 1
            raise PlantedFault

        def after_step(self, tokens: int, has_answered: bool) -> None:
            raise AssertionError("it is not called again")

    with make_runtime() as runtime:
        watcher = Watcher()
        runtime._driver._scheduler.watch(watcher)
        assert len(runtime.generate(PROMPT, max_tokens=4).tokens) == 4
        assert watcher.calls == 1


def test_requests_that_no_step_advances_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = AsyncRuntime(make_runtime())
    assert runtime.problem() is None
    stream = runtime.runtime.submit(PROMPT, max_tokens=2)  # nobody reads it
    assert runtime.problem() is None
    monkeypatch.setattr("edgekit.runtime.async_runtime._STALLED_S", 0.0)
    assert "no step has run" in str(runtime.problem())
    stream.answer()
    assert runtime.problem() is None
    asyncio.run(runtime.close())


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there are no timers by signal")
@pytest.mark.parametrize("where", ["step", "submit", "render"])
def test_a_signal_handler_may_close_and_is_refused_what_would_wait_for_itself(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, told = make_runtime(context=4096), list[str]()

    def handler(*_: object) -> None:
        if where != "render":
            for attempt in (lambda: runtime.generate("a", max_tokens=1), runtime.step):
                try:
                    attempt()
                except Unsupported as error:
                    told.append(str(error))
        runtime.close()

    def interrupt(*_: object) -> None:
        if not told and not runtime._is_closed:
            os.kill(os.getpid(), signal.SIGUSR1)
            for _ in range(100):  # the handler runs between two instructions
                pass

    scheduler = runtime._driver._scheduler
    owner, name = {
        "step": (runtime.engine, "forward"),
        "submit": (scheduler, "_enqueue"),
        "render": (runtime.template._worker, "_running"),
    }[where]
    original = getattr(owner, name)

    def interrupted(*given: Any) -> Any:
        interrupt()
        return original(*given)

    monkeypatch.setattr(owner, name, interrupted)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with suppress(RuntimeClosed):
            runtime.chat([{"role": "user", "content": "the cat"}], max_tokens=50)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert runtime._is_closed and (where == "render" or len(told) == 2)
    assert all("in the middle of a call" in each for each in told)
    with pytest.raises(RuntimeClosed):
        runtime.generate("a", max_tokens=1)
