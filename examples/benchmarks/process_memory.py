"""Memory of this process on Linux, and the most of it while something runs."""

from __future__ import annotations

import threading
from pathlib import Path


def status_bytes(field: str, process: int | str = "self") -> int:
    """Return a figure of /proc/PROCESS/status, such as RssAnon; 0 once the process has ended."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    line = next((line for line in lines if line.startswith(f"{field}:")), f"{field}: 0")
    return int(line.split()[1]) << 10


class HighWater(threading.Thread):
    """The most private memory of a process between `start` and `is_over.set()`, as `most`.

    From inside a process, what a library takes and gives back while it holds the interpreter is not seen.
    """

    def __init__(self, process: int | str = "self") -> None:
        super().__init__(daemon=True)
        self.process, self.most, self.is_over = process, 0, threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(0.002):
            self.most = max(self.most, status_bytes("RssAnon", self.process))
