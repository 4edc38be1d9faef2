"""The one loop: every request, one or many, plain or drafted, prefilling or decoding, advances here.

Whoever waits for a piece drives it, so there is no thread of its own; a step is built from decode chunks and prefill
pieces under a token budget. It knows nothing of text, templates or sampling.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable
from threading import Condition, Lock
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from edgekit.errors import Cancelled, DoesNotFit, InvalidInput
from edgekit.runtime.drafting import Step
from edgekit.runtime.ledger import Ledger
from edgekit.runtime.metrics import Metrics
from edgekit.runtime.sequence import Piece, Sequence
from edgekit.units import show_bytes

if TYPE_CHECKING:
    from edgekit.interfaces import Chunk, Engine
    from edgekit.runtime.drafting import Pace
    from edgekit.runtime.prefixes import Prefixes

Found = TypeVar("Found")
Work: TypeAlias = "tuple[Sequence, Chunk]"


class Loop:
    """Steps one engine for any number of sequences, by rank. Safe to use from several threads."""

    def __init__(
        self,
        engine: Engine,
        *,
        max_running: int,
        budget_tokens: int,
        pace: Pace | None = None,
        ledger: Ledger | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        self._engine, self._pace = engine, pace
        self._ledger, self._prefixes = ledger or Ledger(), prefixes
        self._max_running, self._budget_tokens = max_running, budget_tokens
        self._waiting: list[Sequence] = []  # by rank, as those that run
        self._running: list[Sequence] = []
        self._charged: dict[Sequence, int] = {}  # bytes that the ledger gave for a state
        self._turn = Condition(Lock())  # guards all of this but the engine, which belongs to whoever drives
        self._driven = False
        self._closed = False
        self._count: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._most_held_bytes = 0
        self._engine_s = self._host_s = self._queue_s = self._prefill_s = self._decode_s = 0.0

    def submit(self, sequence: Sequence) -> None:
        """Queue it; it runs as soon as a state and its memory are free and somebody drives."""
        with self._turn:
            if self._closed:
                raise InvalidInput("this runtime is closed; open the artifact again")
            insort(self._waiting, sequence, key=_rank)
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

    def exclusively(self, work: Callable[[], Found]) -> Found:
        """Do `work` between two steps, while the engine and the prefixes are nobody's."""
        with self._turn:
            while self._driven:
                self._turn.wait()
            if self._closed:
                raise InvalidInput("this runtime is closed; open the artifact again")
            self._driven = True
        try:
            return work()
        finally:
            with self._turn:
                self._reap()
                self._driven = False
                self._turn.notify_all()

    def requests_with(self, adapter: str) -> int:
        """How many living requests run it, or wait to."""
        return sum(one.storage.adapter == adapter for one in [*self._running, *self._waiting])

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
            states = [state for state in (sequence.state for sequence in self._running) if state is not None]
            taken = self._ledger.taken
            return Metrics(
                requests=self._count["requests"],
                cached_tokens=self._count["cached_tokens"],
                queue_s=self._queue_s,
                prefill_s=self._prefill_s,
                decode_s=self._decode_s,
                held_tokens=sum(state.length for state in states),
                room_tokens=sum(sequence.storage.capacity_tokens for sequence in self._running),
                states_bytes=taken.get("states", 0),
                most_held_bytes=self._most_held_bytes,
                **self._prefix_figures(),
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

    def _prefix_figures(self) -> dict[str, int]:
        tree = self._prefixes
        if tree is None:
            return {}
        return {
            "prefix_bytes": tree.bytes,
            "prefix_runs": len(tree),
            "prefix_queries": tree.queries,
            "prefix_hits": tree.hits,
            "prefix_hit_tokens": tree.hit_tokens,
            "prefix_asked_tokens": tree.asked_tokens,
        }

    def _step(self) -> None:
        """Build a call from what is ready, make it, and hand each sequence its rows."""
        began = perf_counter()
        with self._turn:
            self._reap()
            self._admit()
            running = list(self._running)
        work: list[Work] = []
        try:
            room = self._budget_tokens
            decoding, reading = in_turn(running)
            if self._pace is not None:
                self._pace.begin(len(decoding))
            for sequence in decoding:
                self._prepare(sequence, room, work)
            for sequence in reading:
                room = self._prepare(sequence, room, work)
            before = sum([len(sequence.tokens) for sequence, _ in work])
            engine_s = sum([self._call(part) for part in apart(work)])
        except BaseException as error:
            # Interrupted anywhere: nobody knows what was fed, so nothing of this step is trusted.
            for sequence in running:
                sequence.fail(Cancelled("interrupted in the middle of a step"))
            raise error
        ended = perf_counter()
        self._count["steps"] += 1
        self._engine_s += engine_s
        self._host_s += ended - began - engine_s
        pace = self._pace
        if pace is not None and not (len(work) == 1 and len(work[0][1].tokens) == 1 and pace.passes()):
            step = step_of(work, before, engine_s, ended - began)
            if step is not None:
                pace.end(step)

    def _call(self, work: list[Work]) -> float:
        """One call of the engine; the seconds that passed inside it."""
        called = perf_counter()
        try:
            answers = self._engine.forward([chunk for _, chunk in work]) if work else []
        except Exception as error:
            # The engine has closed the states of the call. Whoever shared it is tried again alone; others never notice.
            for sequence, _ in work:
                sequence.fail(error) if len(work) == 1 else sequence.lose(error)
            return perf_counter() - called
        answered = perf_counter()
        self._most_held_bytes = max(self._most_held_bytes, self._held_bytes())
        for (sequence, _), logits in zip(work, answers, strict=True):
            try:
                sequence.take(logits)
            except Exception as error:
                sequence.fail(error)  # one request's trouble never leaves it
        return answered - called

    def _held_bytes(self) -> int:
        """Of all states, what their tokens fill."""
        return sum(
            charged * sequence.state.length // sequence.storage.capacity_tokens
            for sequence, charged in self._charged.items()
            if sequence.state is not None
        )

    def _prepare(self, sequence: Sequence, room: int, work: list[Work]) -> int:
        """Add the sequence's next chunk where it fits; decoding always does. What is left of the budget."""
        try:
            chunk = sequence.next_chunk(room)
        except Exception as error:
            sequence.fail(error)
            return room
        if chunk is None:
            return 0  # later prefills wait for their turn behind this one
        work.append((sequence, chunk))
        return room - len(chunk.tokens)

    def _admit(self) -> None:
        """Let those in whose state has room, best rank first; nobody passes one that waits for memory."""
        while self._waiting and len(self._running) < self._max_running:
            sequence = self._waiting[0]
            try:
                if not self._charge(sequence):
                    break
            except Exception as error:
                self._running.append(self._waiting.pop(0))
                sequence.fail(error)
                continue
            insort(self._running, self._waiting.pop(0), key=_rank)
            sequence.turns = min((one.turns for one in self._running if one is not sequence), default=0)
            try:
                sequence.start(self._engine.start(sequence.storage))
            except Exception as error:
                sequence.fail(error)

    def _charge(self, sequence: Sequence) -> bool:
        """Take the memory of its state; prefixes give way. Refused where it can never be had."""
        wanted = self._engine.state_bytes(sequence.storage)
        missing = self._ledger.missing(wanted)
        if missing and self._prefixes is not None:
            self._prefixes.shrink(missing)
        if not self._ledger.take("states", wanted):
            if self._running:
                return False
            free = self._ledger.free_bytes or 0
            raise DoesNotFit(
                f"a state of {sequence.storage.capacity_tokens} tokens needs {show_bytes(wanted)} and "
                f"{show_bytes(max(0, free))} are free; open with more memory, a window or a smaller context"
            )
        self._charged[sequence] = wanted
        return True

    def _reap(self) -> None:
        """Let go of what has ended, however it ended."""
        for sequence in [*self._running, *self._waiting]:
            if sequence.cancelled:
                sequence.finish("cancelled")
        for sequence in [one for one in self._running if one.state is None]:
            self._running.remove(sequence)
            self._ledger.give("states", self._charged.pop(sequence, 0))
            if not sequence.is_done:
                insort(self._waiting, sequence, key=_rank)  # its call failed; it begins again
            else:
                self._tally(sequence)
        for sequence in [one for one in self._waiting if one.is_done]:
            self._waiting.remove(sequence)
            self._tally(sequence)

    def _tally(self, sequence: Sequence) -> None:
        timings = sequence.timings()
        self._ended[sequence.finish_reason or "error"] += 1
        self._count["prompt_tokens"] += sequence.prompt_tokens
        self._count["cached_tokens"] += sequence.cached_tokens
        self._count["tokens"] += sequence.generated
        self._count["proposed"] += sequence.proposed
        self._count["accepted"] += sequence.accepted
        self._count["evictions"] += sequence.evictions
        self._queue_s += timings.queue_s
        self._prefill_s += timings.prefill_s
        self._decode_s += timings.decode_s


def _rank(sequence: Sequence) -> float:
    return sequence.rank


def in_turn(running: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Who decodes, and who reads its prompt, those first that had the fewest turns; who lost its state does neither."""
    decoding, reading = list[Sequence](), list[Sequence]()
    for one in running:
        if one.state is not None:
            (decoding if one.is_decoding() else reading).append(one)
    reading.sort(key=lambda one: one.turns)
    return decoding, reading


def apart(work: list[Work]) -> list[list[Work]]:
    """The calls of a step: all in one, but for those with whom a call failed before."""
    together = [one for one in work if not one[0].is_suspect]
    return [part for part in (together, *([one] for one in work if one[0].is_suspect)) if part]


def step_of(work: list[Work], tokens_before: int, engine_s: float, total_s: float) -> Step | None:
    """A step, as the pace of drafting learns from it: a sequence that decodes asks for a row of each token it feeds."""
    chunks, tokens = list[int](), -tokens_before
    for sequence, chunk in work:
        if sequence.error is not None:
            return None
        tokens += len(sequence.tokens)
        if chunk.rows == len(chunk.tokens):
            chunks.append(chunk.rows)
    return Step(chunks, len(chunks) < len(work), tokens, engine_s, total_s)
