"""Memory of a process on Linux, the most of it while something runs, and what malloc has given out."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path


def status_bytes(field: str, process: int | str = "self") -> int:
    """Return a figure of /proc/PROCESS/status, such as RssAnon; 0 once the process has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    line = next((line for line in lines if line.startswith(f"{field}:")), f"{field}: 0")
    return int(line.split()[1]) << 10


class HighWater(threading.Thread):
    """The most private memory of a process between `start` and `is_over.set()`, as `most`.

    From inside a process, what a library takes and gives back while it holds the interpreter is not seen.
    """

    def __init__(self, process: int | str = "self") -> None:
        super().__init__(daemon=True)
        self.process, self.most, self.is_over = process, 0, threading.Event()
        self._lock = threading.Lock()

    def run(self) -> None:
        while not self.is_over.wait(0.002):
            with self._lock:
                self.most = max(self.most, status_bytes("RssAnon", self.process))

    def next_phase(self) -> int:
        """Return the most so far, and begin again."""
        with self._lock:
            most, self.most = self.most, 0
        return most


class _Counts(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    )  # fmt: skip


def used_bytes() -> int | None:
    """Return the bytes that malloc has given out; None where the C library does not say. Holes are not among them."""
    try:
        count = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    count.restype = _Counts
    counts = count()
    return int(counts.uordblks + counts.hblkhd)
