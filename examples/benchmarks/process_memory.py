"""Memory of this process on Linux, and the most of it while something runs."""

from __future__ import annotations

import threading
from pathlib import Path


def status_bytes(field: str) -> int:
    """Return a figure of /proc/self/status, such as RssAnon."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


class HighWater(threading.Thread):
    """The most private memory between `start` and `is_over.set()`, as `most`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.is_over = 0, threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(0.002):
            self.most = max(self.most, status_bytes("RssAnon"))
