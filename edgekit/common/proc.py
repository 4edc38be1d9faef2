"""Figures of Linux's /proc. Other systems have none."""

from __future__ import annotations

from pathlib import Path


def memory_sizes(path: Path) -> dict[str, int]:
    """Return the sizes in a file such as /proc/self/status, in bytes; empty if it cannot be read."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = [line.split(":", 1) for line in lines if line.endswith(" kB") and ":" in line]
    return {name: int(value.removesuffix(" kB")) << 10 for name, value in pairs}


def cpuinfo(*names: str) -> str:
    """Return the first line of /proc/cpuinfo that begins with one of `names`, after its colon; empty without one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")
