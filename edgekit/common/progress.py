"""Reports of long work: progress, notes and warnings."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from edgekit.common.log import log


class Progress(Protocol):
    """A callback that long work calls with the units done, their total and a description of the current step."""

    def __call__(self, done: float, total: float, what: str) -> None: ...


def no_progress(done: float, total: float, what: str) -> None:
    """Report nothing."""


class Reporter(NamedTuple):
    """Takes what long work has to tell: its progress, notes such as an expected duration, and warnings."""

    progress: Progress = no_progress
    note: Callable[[str], None] = log.info
    warn: Callable[[str], None] = log.warning
