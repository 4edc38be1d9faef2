"""The one loop: every request, one or many, plain or drafted, prefilling or decoding, advances here.

Whoever waits for a piece drives it, so there is no thread of its own; a step is built from decode chunks and prefill
pieces under a token budget. It knows nothing of text, templates or sampling.
"""

from __future__ import annotations

from collections import Counter, deque
from threading import Condition, Lock
from time import perf_counter
from typing import TYPE_CHECKING

from edgekit.errors import Cancelled, InvalidInput
from edgekit.runtime.drafting import Step
from edgekit.runtime.metrics import Metrics
from edgekit.runtime.sequence import Piece, Sequence

if TYPE_CHECKING:
    from edgekit.cache import Storage
    from edgekit.interfaces import Chunk, Engine
    from edgekit.runtime.drafting import Pace


class Loop:
    """Steps one engine for any number of sequences, first come, first served. Safe to use from several threads."""

    def __init__(
        self, engine: Engine, storage: Storage, *, max_running: int, budget_tokens: int, pace: Pace | None = None
    ) -> None:
        self._engine, self._storage, self._pace = engine, storage, pace
        self._max_running, self._budget_tokens = max_running, budget_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._turn = Condition(Lock())  # guards all of this but the engine, which belongs to whoever drives
        self._driven = False
        self._closed = False
        self._count: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._engine_s = self._host_s = 0.0

    def submit(self, sequence: Sequence) -> None:
        """Queue it; it runs as soon as a state is free and somebody drives."""
        with self._turn:
            if self._closed:
                raise InvalidInput("this runtime is closed; open the artifact again")
            self._waiting.append(sequence)
            self._count["requests"] += 1

    def next_piece(self, sequence: Sequence) -> Piece | None:
        """The sequence's next piece, driving the loop while there is none; None after its last."""
        while True:
            with self._turn:
                while self._driven and not sequence.pieces and not sequence.is_done:
                    self._turn.wait()
                if sequence.pieces:
                    return sequence.pieces.popleft()
                if sequence.error is not None:
                    raise sequence.error
                if sequence.is_done:
                    return None
                self._driven = True
            self._drive()

    def _drive(self) -> None:
        try:
            self._step()
        finally:
            with self._turn:
                self._reap()
                self._driven = False
                self._turn.notify_all()

    def cancel(self, sequence: Sequence) -> None:
        """End it with reason `cancelled`: now, or after the step that is running. Safe from any thread."""
        with self._turn:
            sequence.cancelled = True
            if not self._driven:
                self._reap()
                self._turn.notify_all()

    def cancel_soon(self, sequence: Sequence) -> None:
        """As `cancel`, but never waits for a lock: for signal handlers and finalizers, which may stand in one."""
        sequence.cancelled = True
        if self._turn.acquire(blocking=False):
            try:
                if not self._driven:
                    self._reap()
                self._turn.notify_all()
            finally:
                self._turn.release()

    def drive(self) -> None:
        """One step, after the one that somebody else may be driving."""
        with self._turn:
            while self._driven:
                self._turn.wait()
            self._driven = True
        self._drive()

    def poll(self, sequence: Sequence) -> list[Piece]:
        """The pieces that are there, without driving; a failed sequence raises after its last."""
        with self._turn:
            pieces = list(sequence.pieces)
            sequence.pieces.clear()
        if not pieces and sequence.error is not None:
            raise sequence.error
        return pieces

    def close(self) -> None:
        """Cancel everything and wait for a step that is running; the engine is then nobody's."""
        with self._turn:
            self._closed = True
            for sequence in [*self._running, *self._waiting]:
                sequence.cancelled = True
            while self._driven:
                self._turn.wait()
            self._reap()
            self._turn.notify_all()

    def metrics(self) -> Metrics:
        with self._turn:
            return Metrics(
                requests=self._count["requests"],
                finished=dict(self._ended),
                waiting=len(self._waiting),
                running=len(self._running),
                prompt_tokens=self._count["prompt_tokens"],
                tokens=self._count["tokens"],
                proposed=self._count["proposed"],
                accepted=self._count["accepted"],
                evictions=self._count["evictions"],
                steps=self._count["steps"],
                engine_s=self._engine_s,
                host_s=self._host_s,
            )

    def _step(self) -> None:
        """Build one call from what is ready, make it, and hand each sequence its rows."""
        began = perf_counter()
        with self._turn:
            self._reap()
            self._admit()
            running = list(self._running)
        work: list[tuple[Sequence, Chunk]] = []
        try:
            room = self._budget_tokens
            if self._pace is not None:
                self._pace.begin(sum(sequence.state is not None and sequence.is_decoding() for sequence in running))
            for sequence in running:
                room = self._prepare(sequence, room, work)
            called = perf_counter()
            answers = self._engine.forward([chunk for _, chunk in work]) if work else []
            answered = perf_counter()
            before = sum(len(sequence.tokens) for sequence, _ in work)
            for (sequence, _), logits in zip(work, answers, strict=True):
                try:
                    sequence.take(logits)
                except Exception as error:
                    sequence.fail(error)  # one request's trouble never leaves it
        except Exception as error:
            # The engine has closed the states of the call; others live.
            for sequence, _ in work:
                sequence.fail(error)
        except BaseException as error:
            # Interrupted anywhere: nobody knows what was fed, so nothing of this step is trusted.
            for sequence in running:
                sequence.fail(Cancelled("interrupted in the middle of a step"))
            raise error
        else:
            self._count["steps"] += 1
            self._engine_s += answered - called
            ended = perf_counter()
            self._host_s += ended - answered + called - began
            if self._pace is not None:
                tokens = sum(len(sequence.tokens) for sequence, _ in work) - before
                self._pace.end(step_of(work, tokens, answered - called, ended - began))

    def _prepare(self, sequence: Sequence, room: int, work: list[tuple[Sequence, Chunk]]) -> int:
        """Add the sequence's next chunk where it fits; decoding always does. What is left of the budget."""
        try:
            decoding = sequence.is_decoding()
            chunk = sequence.next_chunk(room)
        except Exception as error:
            sequence.fail(error)
            return room
        if chunk is None:
            return 0  # later prefills wait behind this one: first come, first served
        work.append((sequence, chunk))
        return room if decoding else room - len(chunk.tokens)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            sequence = self._waiting.popleft()
            self._running.append(sequence)
            try:
                sequence.start(self._engine.start(self._storage))
            except Exception as error:
                sequence.fail(error)

    def _reap(self) -> None:
        """Let go of what has ended, however it ended."""
        for sequence in [*self._running, *self._waiting]:
            if sequence.cancelled:
                sequence.finish("cancelled")
        for sequence in [one for one in (*self._running, *self._waiting) if one.is_done]:
            (self._running if sequence in self._running else self._waiting).remove(sequence)
            self._ended[sequence.finish_reason or "error"] += 1
            self._count["prompt_tokens"] += sequence.prompt_tokens
            self._count["tokens"] += sequence.generated
            self._count["proposed"] += sequence.proposed
            self._count["accepted"] += sequence.accepted
            self._count["evictions"] += sequence.evictions


def step_of(work: list[tuple[Sequence, Chunk]], tokens: int, engine_s: float, total_s: float) -> Step:
    """A step, as the pace of drafting learns from it: a sequence that decodes asks for a row of each token it feeds."""
    decoding = tuple(len(chunk.tokens) for _, chunk in work if chunk.rows == len(chunk.tokens))
    return Step(decoding, len(decoding) < len(work), tokens, engine_s, total_s)
