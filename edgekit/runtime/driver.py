"""Let threads share the scheduler: the thread that waits for a piece steps it for all requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Lock, get_ident
from typing import TYPE_CHECKING, TypeVar, cast

from edgekit.common.locks import interrupted_call
from edgekit.common.log import log
from edgekit.errors import RuntimeClosed, TargetFailed
from edgekit.runtime.lifetimes import OwnedByProcess
from edgekit.runtime.text_assembler import Piece

if TYPE_CHECKING:
    from edgekit.common.histogram import Histogram
    from edgekit.runtime.metrics import Metrics
    from edgekit.runtime.request import Request
    from edgekit.runtime.scheduler import Scheduler

Result = TypeVar("Result")


class Driver(OwnedByProcess):
    """Thread-safe access to a scheduler. At most one thread drives (runs a step or exclusive work); others wait."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._changed = Condition(cast(Lock, scheduler.lock))
        self._driving: int | None = None  # the thread that drives
        self._is_closed = False
        self._num_exclusive = 0  # threads that wait for sole use: no step begins before them
        self._missed = False  # a request was cancelled while another thread had the lock
        self._release: Callable[[], None] | None = None  # the rest of `close`, after the step that it interrupted

    def submit(self, *requests: Request) -> None:
        """Queue all requests, or none if it raises; they advance whenever a thread drives."""
        self.check_free()
        try:
            with self._locked():
                self._check_open()
                self._scheduler.add(*requests)
        except BaseException:
            for request in requests:
                self.cancel_soon(request)
            raise

    def next_piece(self, request: Request) -> Piece | None:
        """Return the request's next piece, driving until there is one; None after the last."""
        self.check_free()
        pieces = request.text.pieces
        while True:
            try:
                with self._locked():
                    while (self._driving or self._num_exclusive) and not pieces and not request.is_done:
                        self._changed.wait()
                    if pieces:
                        return pieces.popleft()
                    if request.error is not None:
                        raise request.error
                    if request.is_done:
                        return None
                    self._driving = get_ident()
                self._drive(self._scheduler.step)
            finally:
                self.stop_driving()

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
        self.check_free()
        try:
            with self._locked():
                while self._driving or self._num_exclusive:
                    self._changed.wait()
                self._driving = get_ident()
            self._drive(self._scheduler.step)
        finally:
            self.stop_driving()

    def exclusively(self, work: Callable[[], Result]) -> Result:
        """Run `work` between two steps, with sole use of the engine, the budget and the prefix cache."""
        self.check_free()
        try:
            with self._locked():
                self._num_exclusive += 1
                try:
                    while self._driving:
                        self._changed.wait()
                    self._check_open()
                    self._driving = get_ident()
                finally:
                    self._num_exclusive -= 1
                    self._changed.notify_all()
            return self._drive(work)
        finally:
            self.stop_driving()

    def cancel(self, request: Request) -> None:
        """End the request with reason `cancelled`: now, or after the running step. Safe from any thread."""
        self.check_process()
        if self._scheduler.lock.is_mine:
            self.cancel_soon(request)
            return
        with self._locked():
            request.is_cancelled = True
            self._retire()

    def cancel_soon(self, request: Request) -> None:
        """Like `cancel`, but never wait for the lock: for signal handlers and finalizers, which may interrupt it."""
        request.is_cancelled = self._missed = True
        if not self.is_forked:
            self._after_unlocking()

    def close(self, interrupt: Callable[[], None], release: Callable[[], None]) -> None:
        """Cancel all requests, `interrupt` the engines in a running step, wait for it to end, and `release` them.

        In a signal handler that interrupted a step of this thread, the step releases them at its end.
        """
        self.check_process()
        self._is_closed = True
        self._scheduler.cancel_all()
        if self._scheduler.lock.is_mine or self._driving == get_ident():
            self._release = release
            if self._driving:
                interrupt()
            return
        with self._locked():
            try:
                if self._driving:
                    interrupt()
                while self._driving:
                    self._changed.wait()
            finally:
                self._release = release

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

    def check_free(self) -> None:
        """Refuse a call by a thread that is in the middle of another one, because it would wait for itself."""
        self.check_process()
        if self._driving == get_ident() or self._scheduler.lock.is_mine:
            raise interrupted_call()

    def stalled_s(self) -> float:
        """Return for how many seconds requests have waited while no step began or ended; 0.0 if none waits."""
        with self._locked():
            return self._scheduler.stalled_s()

    def _drive(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except TargetFailed as error:
            if self._is_closed:
                raise RuntimeClosed("this runtime was closed during the call; open the artifact again") from error
            raise

    def stop_driving(self) -> None:
        """Let another thread drive, if this one did."""
        if self._driving != get_ident():
            return
        with self._changed:
            try:
                self._scheduler.retire_finished()
            except Exception as error:
                log.warning("ended requests are still held: %s", type(error).__name__)  # until the next step
            finally:
                self._driving = None
                self._changed.notify_all()
        self._after_unlocking()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock; on release, do what signal handlers could not do meanwhile."""
        try:
            with self._changed:
                yield
        finally:
            self._after_unlocking()

    def _after_unlocking(self) -> None:
        """Retire requests of `cancel_soon` and finish `close`. If a thread has the lock, it does so on release."""
        while (self._missed or self._is_closing) and self._changed.acquire(blocking=False):
            release = None
            try:
                self._missed = False
                if self._is_closing:
                    release, self._release = self._release, None
                    self._scheduler.cancel_all()  # also what was being queued when the handler ran
                self._retire()
            finally:
                self._changed.release()
            if release is not None:
                release()

    @property
    def _is_closing(self) -> bool:
        return self._release is not None and self._driving is None

    def _retire(self) -> None:
        """Retire ended requests now, or after the running step. The caller has the lock."""
        if self._driving is None:
            self._scheduler.retire_finished()
        self._changed.notify_all()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeClosed("this runtime is closed; open the artifact again")
