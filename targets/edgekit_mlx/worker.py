"""One thread for every MLX call, because an array that is not evaluated yet belongs to the thread that made it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from edgekit.errors import InvalidInput, vendor_errors

Result = TypeVar("Result")


class MlxThread:
    """Runs calls on its own thread, one after the other; the caller waits for each."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlx")
        self._is_closed = False

    def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` and return its result. MLX's errors are raised as TargetFailed."""
        if self._is_closed:
            raise InvalidInput("the engine is closed")
        if threading.current_thread().name.startswith("mlx_"):
            return work()  # already on the thread
        return self._pool.submit(_guarded, work).result()

    def close(self) -> None:
        """Wait for the running call and end the thread."""
        self._is_closed = True
        self._pool.shutdown(wait=True)


def _guarded(work: Callable[[], Result]) -> Result:
    with vendor_errors("mlx"):
        return work()
