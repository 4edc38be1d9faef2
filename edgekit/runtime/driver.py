"""Let threads share the scheduler: the thread that waits for a piece steps it for all requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition
from typing import TYPE_CHECKING, TypeVar

from edgekit.errors import RuntimeClosed, TargetFailed
from edgekit.runtime.lifetimes import OwnedByProcess
from edgekit.runtime.text_assembler import Piece

if TYPE_CHECKING:
    from edgekit.runtime.histograms import Histogram
    from edgekit.runtime.metrics import Metrics
    from edgekit.runtime.request import Request
    from edgekit.runtime.scheduler import Scheduler

Result = TypeVar("Result")


class Driver(OwnedByProcess):
    """Thread-safe access to a scheduler. At most one thread drives (runs a step or exclusive work); others wait."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._changed = Condition(scheduler.lock)
        self._is_driven = self._is_closed = False
        self._num_exclusive = 0  # threads that wait for sole use: no step begins before them
        self._missed = False  # a request was cancelled while another thread had the lock

    def submit(self, request: Request) -> None:
        """Queue a request; it advances whenever a thread drives."""
        self.check_process()
        with self._locked():
            self._check_open()
            self._scheduler.add(request)

    def next_piece(self, request: Request) -> Piece | None:
        """Return the request's next piece, driving until there is one; None after the last."""
        self.check_process()
        pieces = request.text.pieces
        while True:
            with self._locked():
                while (self._is_driven or self._num_exclusive) and not pieces and not request.is_done:
                    self._changed.wait()
                if pieces:
                    return pieces.popleft()
                if request.error is not None:
                    raise request.error
                if request.is_done:
                    return None
                self._is_driven = True
            self._drive(self._scheduler.step)

    def poll(self, request: Request, most: int | None = None) -> list[Piece]:
        """Return queued pieces, without driving or waiting. A failed request raises after its last piece."""
        self.check_process()
        error = request.error  # read first: no piece follows an error
        queued, pieces = request.text.pieces, list[Piece]()
        while queued and (most is None or len(pieces) < most):
            pieces.append(queued.popleft())  # atomic, so no lock is needed; a stream has one reader
        if not pieces and error is not None:
            raise error
        return pieces

    def step(self) -> None:
        """Run one step. Waits for a step that another thread is running."""
        self.check_process()
        with self._locked():
            while self._is_driven or self._num_exclusive:
                self._changed.wait()
            self._is_driven = True
        self._drive(self._scheduler.step)

    def exclusively(self, work: Callable[[], Result]) -> Result:
        """Run `work` between two steps, with sole use of the engine, the budget and the prefix cache."""
        self.check_process()
        with self._locked():
            self._num_exclusive += 1
            try:
                while self._is_driven:
                    self._changed.wait()
                self._check_open()
                self._is_driven = True
            finally:
                self._num_exclusive -= 1
                self._changed.notify_all()
        return self._drive(work)

    def cancel(self, request: Request) -> None:
        """End the request with reason `cancelled`: now, or after the running step. Safe from any thread."""
        self.check_process()
        with self._locked():
            request.is_cancelled = True
            self._retire()

    def cancel_soon(self, request: Request) -> None:
        """Like `cancel`, but never wait for the lock: for signal handlers and finalizers, which may interrupt it."""
        request.is_cancelled = self._missed = True
        if not self.is_forked:
            self._retire_missed()

    def close(self, interrupt: Callable[[], None]) -> None:
        """Cancel all requests, `interrupt` the engines in a running step and wait for it to end."""
        self.check_process()
        with self._locked():
            self._is_closed = True
            self._scheduler.cancel_all()
            if self._is_driven:
                interrupt()
            while self._is_driven:
                self._changed.wait()
            self._scheduler.retire_finished()
            self._changed.notify_all()

    def num_requests_with(self, adapter: str) -> int:
        """Return the number of running and waiting requests that use `adapter`."""
        self.check_process()
        with self._locked():
            return self._scheduler.num_requests_with(adapter)

    def histograms(self) -> dict[str, Histogram]:
        self.check_process()
        with self._locked():
            return self._scheduler.histograms()

    def metrics(self) -> Metrics:
        self.check_process()
        with self._locked():
            return self._scheduler.metrics()

    def _drive(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except TargetFailed as error:
            if self._is_closed:
                raise RuntimeClosed("this runtime was closed during the call; open the artifact again") from error
            raise
        finally:
            with self._locked():
                self._scheduler.retire_finished()
                self._is_driven = False
                self._changed.notify_all()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, and then do what `cancel_soon` could not do meanwhile."""
        try:
            with self._changed:
                yield
        finally:
            self._retire_missed()

    def _retire_missed(self) -> None:
        """Retire requests of `cancel_soon`, unless a thread has the lock: it does so when it releases it."""
        while self._missed and self._changed.acquire(blocking=False):
            try:
                self._missed = False
                self._retire()
            finally:
                self._changed.release()

    def _retire(self) -> None:
        """Retire ended requests now, or after the running step. The caller has the lock."""
        if not self._is_driven:
            self._scheduler.retire_finished()
        self._changed.notify_all()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeClosed("this runtime is closed; open the artifact again")
