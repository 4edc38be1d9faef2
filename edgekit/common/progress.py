"""Progress reports of long work."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A callback that long work calls with the units done, their total and a description of the current step."""

    def __call__(self, done: float, total: float, what: str) -> None: ...
