"""Sizes as text: `1.5GiB` to bytes and back; and the precision of predictions."""

from __future__ import annotations

import re

from edgekit.errors import InvalidInput, quote_short

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_FACTORS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_FACTORS |= {"kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40}
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([a-z]{0,3})\s*", re.IGNORECASE)


def parse_bytes(text: str, what: str = "size") -> int:
    """Parse `1.5GiB`, `800 MB` or `123456`. Errors name the value `what`."""
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise InvalidInput(f"{what}: {quote_short(text)} is not a size; write it as 1.5GiB, 800MB or a number of bytes")
    return int(float(match[1]) * factor)


def show_bytes(count: float) -> str:
    """Format bytes with three significant figures, in binary units."""
    sign, size = ("-", -count) if count < 0 else ("", float(count))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 999.5:
            return f"{sign}{size:.0f} {unit}" if unit == "B" else f"{sign}{size:.3g} {unit}"
        size /= 1024
    return f"{sign}{size:.3g} TiB" if size < 999.5 else f"{sign}{size:.0f} TiB"


def rounded(value: float) -> float:
    """Round to three significant figures, the precision of a prediction."""
    return float(f"{value:.3g}")
