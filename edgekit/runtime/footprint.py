"""How much memory this process takes, as the OS counts it. Each figure has the name that the OS gives it."""

from __future__ import annotations

import sys
from pathlib import Path

from edgekit.frozen import Frozen


class Footprint(Frozen):
    """Bytes of this process; None where this OS does not tell."""

    rss_bytes: int | None = None  # resident, shared pages counted in full
    pss_bytes: int | None = None  # resident, shared pages divided among those who share them
    anonymous_bytes: int | None = None  # private memory that no file stands behind
    peak_rss_bytes: int | None = None


def footprint() -> Footprint:
    """As of now."""
    status = _kilobytes(Path("/proc/self/status"))
    rollup = _kilobytes(Path("/proc/self/smaps_rollup"))
    peak = status.get("VmHWM")
    return Footprint(
        rss_bytes=status.get("VmRSS"),
        pss_bytes=rollup.get("Pss"),
        anonymous_bytes=status.get("RssAnon"),
        peak_rss_bytes=_peak() if peak is None else peak,
    )


def _kilobytes(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = [line.split(":", 1) for line in lines if line.endswith(" kB") and ":" in line]
    return {name: int(value.removesuffix(" kB")) << 10 for name, value in pairs}


def _peak() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
