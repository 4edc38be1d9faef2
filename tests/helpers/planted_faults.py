"""Raise an error at one call, or at one line, of edgekit's runtime; used to show that nothing is left behind."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

import edgekit.runtime

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
