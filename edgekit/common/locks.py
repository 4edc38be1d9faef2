"""A lock that a signal handler cannot wait for in vain."""

from __future__ import annotations

from threading import RLock, get_ident

from edgekit.errors import Unsupported


class ThreadLock:
    """A lock that refuses a thread that already holds it, such as one interrupted by a signal handler.

    A plain lock would let that thread wait for itself for ever.
    """

    def __init__(self) -> None:
        # Reentrant, so that a handler which runs between these two lines of `acquire` gets it too.
        self._lock = RLock()
        self._owner: int | None = None

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has the lock."""
        return self._owner == get_ident()

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock; False: another thread has it. Raises `Unsupported` rather than wait for this thread itself."""
        if self.is_mine:
            if not blocking:
                return False
            raise interrupted_call()
        if not self._lock.acquire(blocking):
            return False
        self._owner = get_ident()
        return True

    def release(self) -> None:
        self._owner = None
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def interrupted_call() -> Unsupported:
    """The error for a call out of the middle of another call of the same thread."""
    return Unsupported(
        "this thread is in the middle of a call of this runtime, as a signal handler is that interrupts one; "
        "set a flag there, or call `close` or `cancel`, and do the rest after that call"
    )
