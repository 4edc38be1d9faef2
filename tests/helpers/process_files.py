"""The files that this process has open."""

from __future__ import annotations

from pathlib import Path


def open_files() -> int:
    """Return the number of open file descriptors; 0 if the system does not report it."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0
