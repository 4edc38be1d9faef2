"""The one loop: every request, alone or batched, plain or drafted, prefilling or decoding, advances in `step`.

A step makes one engine call from the next chunks of all running requests. Decoding requests always take part; prompts
fill what is left of the step's token budget. The scheduler has no thread: `Driver` calls `step`.
"""

from __future__ import annotations

from bisect import insort
from time import perf_counter
from typing import TYPE_CHECKING, Protocol, TypeAlias
from weakref import WeakSet

from edgekit.common.histogram import Histogram
from edgekit.common.locks import ThreadLock
from edgekit.common.log import log
from edgekit.common.units import MIB, show_bytes
from edgekit.errors import Cancelled, DoesNotFit
from edgekit.runtime.memory.budget import MemoryBudget
from edgekit.runtime.metrics import Metrics, RuntimeCounters
from edgekit.runtime.request import Request, Status
from edgekit.runtime.text_assembler import TextAssembler

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgekit.contracts.engine import Chunk, Engine
    from edgekit.runtime.prefix_cache.tree import Prefixes
    from edgekit.runtime.speculation.controller import SpeculationController

UNREAD_SPARE_BYTES = MIB  # unread pieces of answers below this size hold nothing back
QUEUE_SPARE_BYTES = MIB  # waiting requests below this size are never refused
_REQUEST_BYTES = 6 << 10  # of a waiting request, without its tokens; measured
_TOKEN_BYTES = 4
PRIORITY_S = 10.0  # seconds of waiting that one step of priority is worth
Batch: TypeAlias = "list[tuple[Request, Chunk]]"


class StepWatcher(Protocol):
    """Called before and after every step, by the thread that drives."""

    def before_step(self) -> None: ...

    def after_step(self, tokens: int, has_answered: bool) -> None:
        """`tokens`: the number that the step generated; `has_answered`: it completed an answer."""


class RankClock:
    """Seconds for ranks. However far the system's clock jumps, one reading adds at most a step of priority."""

    def __init__(self) -> None:
        self._last, self._seconds = perf_counter(), 0.0

    def read(self) -> float:
        now = perf_counter()
        self._seconds += min(max(0.0, now - self._last), PRIORITY_S)
        self._last = now
        return self._seconds


class Scheduler:
    """Advance any number of requests on one engine.

    `lock` guards the queues. The driver holds it around every method but `step`, which takes it itself and releases it
    while the engine runs.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_running: int,
        step_tokens: int,
        controller: SpeculationController | None = None,
        budget: MemoryBudget | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.lock = ThreadLock()
        self._engine, self._controller = engine, controller
        self._max_running, self._step_tokens = max_running, step_tokens
        self._budget, self._prefixes = budget or MemoryBudget(), prefixes
        self._waiting: list[Request] = []  # both in the order of their ranks
        self._running: list[Request] = []
        self._answers = WeakSet[TextAssembler]()  # of all requests that somebody still holds
        self._state_bytes: dict[Request, int] = {}  # taken from the budget for the state of each running request
        self._counters, self._clock = RuntimeCounters(), RankClock()
        self._watchers: tuple[StepWatcher, ...] = ()
        self._progress_at = perf_counter()  # when the last step began or ended, or a queue began

    def watch(self, watcher: StepWatcher) -> None:
        """Call `watcher` at every step from now on."""
        self._watchers = (*self._watchers, watcher)

    def add(self, *requests: Request) -> None:
        """Queue requests, all or none; each runs as soon as a state and its memory are free.

        Raises `DoesNotFit` for a queue without memory. One request is always queued where no other waits.
        """
        size = sum(map(_size, requests))
        if self._waiting or len(requests) > 1:
            excess = self._queued_bytes + size - QUEUE_SPARE_BYTES
            if self._budget.missing(excess):
                more = "one more" if len(requests) == 1 else f"{len(requests)} more"
                raise DoesNotFit(
                    f"{len(self._waiting)} requests wait, which take {show_bytes(self._queued_bytes)}, and the memory "
                    f"for {more} is not free; submit it when some have ended, or open with more memory"
                )
        now = self._clock.read()
        if not self._waiting:
            self._progress_at = perf_counter()
        try:
            for request in requests:
                # Requests run in the order of their ranks. Waiting lowers the rank against later ones, so none starves.
                request.rank = now - request.priority * PRIORITY_S
                self._enqueue(request)
        except BaseException:
            for request in requests:
                if request in self._waiting:
                    self._dequeue(request)
            raise
        self._counters.requests += len(requests)

    def stalled_s(self) -> float:
        """Return for how many seconds requests have waited while no step began or ended; 0.0 if none waits."""
        return perf_counter() - self._progress_at if self._waiting else 0.0

    def step(self) -> None:
        """Advance every running request by one engine call. An error ends the requests of the step."""
        try:
            self._step()
        except BaseException as error:
            # The call was interrupted after an unknown number of tokens, so no state of this step can be used again.
            if isinstance(error, Exception):
                log.error("a step failed: %s", error, exc_info=True)
            is_interrupted = not isinstance(error, Exception)
            running = [request for request in self._running if not request.is_done]
            for request in running or list(self._waiting):
                request.fail(Cancelled("interrupted in the middle of a step") if is_interrupted else error)
            if is_interrupted:
                raise
        finally:
            self._progress_at = perf_counter()

    def _step(self) -> None:
        started = self._progress_at = perf_counter()
        with self.lock:
            self._clock.read()
            self.retire_finished()
            self._admit_waiting()
            running = self._next_to_run()
        self._tell_watchers(lambda watcher: watcher.before_step())
        batch = self._next_batch(running)
        num_tokens = sum([len(request.tokens) for request, _ in batch])
        engine_s = sum([self._forward(part) for part in separate_suspects(batch)])
        total_s = perf_counter() - started
        self._counters.steps += 1
        self._counters.engine_s += engine_s
        self._counters.host_s += total_s - engine_s
        new_tokens = sum([len(request.tokens) for request, _ in batch]) - num_tokens
        if self._watchers:
            has_answered = any(request.finish_reason not in (None, "cancelled") for request in running)
            self._tell_watchers(lambda watcher: watcher.after_step(new_tokens, has_answered))
        if self._controller is not None:
            _tell(self._controller, batch, new_tokens, total_s)

    def _tell_watchers(self, tell: Callable[[StepWatcher], None]) -> None:
        """Call every watcher. One that fails is not called again, because no request depends on it."""
        for watcher in self._watchers:
            try:
                tell(watcher)
            except Exception as error:
                self._watchers = tuple(each for each in self._watchers if each is not watcher)
                log.error("%s failed and is not called again: %s", type(watcher).__name__, error, exc_info=True)

    def _admit_waiting(self) -> None:
        """Start waiting requests, best rank first. None overtakes a request that waits for memory."""
        while self._waiting and len(self._running) < self._max_running:
            request = self._waiting[0]
            try:
                if not self._reserve_state(request):
                    break
                request.counters.prefill_chunks = min(
                    [other.counters.prefill_chunks for other in self._running], default=0
                )
                insort(self._running, self._dequeue(request), key=_rank)
                self._answers.add(request.text)
                request.state = self._engine.start(request.limits.kv_config)
                request.start(request.state)
            except Exception as error:
                if request in self._waiting:
                    self._running.append(self._dequeue(request))  # `retire_finished` returns its memory
                request.fail(error)

    def _next_to_run(self) -> list[Request]:
        """Return the running requests, without the ones whose unread answers take too much memory.

        If all cause it, one goes on: its reader may be waiting for another request that this one holds back.
        """
        if not self._budget.missing(self._unread_excess()):
            return list(self._running)
        return [each for each in self._running if not self._is_unread(each)] or self._running[:1]

    def _next_batch(self, running: list[Request]) -> Batch:
        """Return the next chunk of every decoding request, and chunks of prompts within the token budget."""
        batch: Batch = []
        remaining = self._step_tokens
        decoding, prefilling = split_phases(running)
        if self._controller is not None:
            self._controller.begin(len(decoding))
        for request in [*decoding, *prefilling]:
            try:
                chunk = request.next_chunk(remaining)
            except Exception as error:
                request.fail(error)
                continue
            if chunk is None:
                break  # prompts behind this one wait for their turn
            batch.append((request, chunk))
            if chunk.hidden or chunk.num_logits < len(chunk.tokens):
                remaining -= len(chunk.tokens)
        return batch

    def _forward(self, batch: Batch) -> float:
        """Make one engine call and give each request its logits; return the seconds inside the engine."""
        started = perf_counter()
        try:
            results = self._engine.forward([chunk for _, chunk in batch])
        except Exception as error:
            # The engine has closed the states of this call. Requests that shared it are tried again, each alone.
            if not all(request.is_cancelled for request, _ in batch):
                log.warning("an engine call of %d requests failed: %s", len(batch), type(error).__name__)
            for request, _ in batch:
                request.fail(error) if len(batch) == 1 or request.is_cancelled else request.requeue(error)
            return perf_counter() - started
        engine_s = perf_counter() - started
        self._counters.peak_kv_bytes = max(self._counters.peak_kv_bytes, self._filled_bytes())
        for (request, _), logits in zip(batch, results, strict=True):
            last_token_at, num_tokens = request.counters.last_token_at, len(request.tokens)
            try:
                request.take(logits)
                if last_token_at and len(request.tokens) > num_tokens:
                    seconds = request.counters.last_token_at - last_token_at
                    self._counters.add_tokens(seconds, len(request.tokens) - num_tokens)
            except Exception as error:
                log.warning("a request failed: %s", type(error).__name__)
                request.fail(error)  # the others go on
        return engine_s

    def retire_finished(self) -> None:
        """Remove ended requests and return their memory; queue requests of failed calls again."""
        for request in [*self._running, *self._waiting]:
            if request.is_cancelled and not request.is_done:
                request.cancel()
        for request in [each for each in self._running if each.status is not Status.RUNNING]:
            self._state_bytes.pop(request, None)
            self._running.remove(request)
            if request.is_done:
                self._count(request)
            else:
                self._enqueue(request)
        for request in [each for each in self._waiting if each.is_done]:
            self._count(self._dequeue(request))
        # By the sum, so that an error in the middle of an earlier call loses nothing.
        self._budget.give("states", self._budget.taken.get("states", 0) - sum(self._state_bytes.values()))

    def _enqueue(self, request: Request) -> None:
        insort(self._waiting, request, key=_rank)

    def _dequeue(self, request: Request) -> Request:
        self._waiting.remove(request)
        return request

    @property
    def _queued_bytes(self) -> int:
        return sum(map(_size, self._waiting))

    def cancel_all(self) -> None:
        for request in [*self._running, *self._waiting]:
            request.is_cancelled = True

    def num_requests_with(self, adapter: str) -> int:
        """Return the number of running and waiting requests that use `adapter`."""
        return sum(each.limits.kv_config.adapter == adapter for each in [*self._running, *self._waiting])

    def _reserve_state(self, request: Request) -> bool:
        """Take a state's memory from the budget, dropping prefixes for it; False: wait for another request to end.

        Unread answers hold new requests back as long as a request runs whose answer is read.
        """
        kv_config = request.limits.kv_config
        needed = self._engine.state_bytes(kv_config)
        unread = self._unread_excess()
        missing = self._budget.missing(needed + unread)
        if missing and self._prefixes is not None:
            self._prefixes.shrink(missing)
        if self._running and self._budget.missing(needed):
            return False
        if self._budget.missing(needed + unread) and not all(self._is_unread(each) for each in self._running):
            return False
        if not self._budget.take("states", needed):
            free = max(0, self._budget.free_bytes or 0)
            raise DoesNotFit(
                f"a state of {kv_config.capacity_tokens} tokens needs {show_bytes(needed)} and {show_bytes(free)} "
                "are free; open with more memory, a window or a smaller context"
            )
        self._state_bytes[request] = needed
        return True

    def _unread_bytes(self) -> int:
        return sum(answer.unread_bytes for answer in self._answers)

    def _unread_excess(self) -> int:
        return max(0, self._unread_bytes() - UNREAD_SPARE_BYTES)

    def _is_unread(self, request: Request) -> bool:
        """Return whether a request has more than its share of unread bytes."""
        return request.text.unread_bytes > UNREAD_SPARE_BYTES // self._max_running

    def _filled_bytes(self) -> int:
        """Return the bytes of all states that tokens fill."""
        return sum(
            size * request.state.length // request.limits.kv_config.capacity_tokens
            for request, size in self._state_bytes.items()
            if request.state is not None
        )

    def _count(self, request: Request) -> None:
        self._counters.add_ended(request.finish_reason or "error", request.timings(), request.counters.evictions)

    def histograms(self) -> dict[str, Histogram]:
        return {name: histogram.copy() for name, histogram in self._counters.histograms.items()}

    def metrics(self) -> Metrics:
        return self._counters.metrics(
            waiting=len(self._waiting),
            running=len(self._running),
            kv_tokens=sum(each.state.length for each in self._running if each.state is not None),
            kv_capacity_tokens=sum(each.limits.kv_config.capacity_tokens for each in self._running),
            states_bytes=self._budget.taken.get("states", 0),
            queued_bytes=self._queued_bytes,
            unread_bytes=self._unread_bytes(),
            **(self._prefixes.figures() if self._prefixes is not None else {}),
        )


def _rank(request: Request) -> float:
    return request.rank


def _size(request: Request) -> int:
    """Return about how many bytes a request takes while it waits."""
    return _REQUEST_BYTES + _TOKEN_BYTES * len(request.tokens)


def split_phases(running: list[Request]) -> tuple[list[Request], list[Request]]:
    """Return the requests that decode, and those that prefill, sorted by their chunks so far."""
    decoding, prefilling = list[Request](), list[Request]()
    for request in running:
        if request.state is not None:
            (decoding if request.is_decoding else prefilling).append(request)
    prefilling.sort(key=lambda request: request.counters.prefill_chunks)
    return decoding, prefilling


def separate_suspects(batch: Batch) -> list[Batch]:
    """Return the calls of a step: one for each request that was in a failed call, and one for all others."""
    together = [each for each in batch if not each[0].is_suspect]
    return [part for part in (together, *([each] for each in batch if each[0].is_suspect)) if part]


def _tell(controller: SpeculationController, batch: Batch, new_tokens: int, total_s: float) -> None:
    """Report a step to the speculation controller, unless a prompt was processed, or a request failed or only reads."""
    computed = 0
    for request, chunk in batch:
        if request.error is not None or not request.generates or chunk.num_logits != len(chunk.tokens):
            return
        computed += request.num_computed
    if batch:
        controller.end(len(batch), computed, new_tokens, total_s)
