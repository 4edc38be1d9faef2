"""One thread for everything that MLX does: arrays that are not computed yet belong to the thread that made them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from edgekit.errors import InvalidInput, vendor_errors

Result = TypeVar("Result")


class Worker:
    """Runs work on its own thread, one piece after the other, and waits for it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlx")
        self._is_closed = False

    def run(self, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises; MLX's own errors come out as ours."""
        if self._is_closed:
            raise InvalidInput("the engine is closed")
        if threading.current_thread().name.startswith("mlx_"):
            return work()  # from within other work
        return self._pool.submit(_guarded, work).result()

    def close(self) -> None:
        """Finish what runs, and end the thread."""
        self._is_closed = True
        self._pool.shutdown(wait=True)


def _guarded(work: Callable[[], Result]) -> Result:
    with vendor_errors("mlx"):
        return work()
