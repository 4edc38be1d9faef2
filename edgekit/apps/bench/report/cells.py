"""A table of text, and number formats for its cells."""

from __future__ import annotations

from typing import NamedTuple

from edgekit.common.units import show_bytes


class Table(NamedTuple):
    """Rows under a head; the first column names the row."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def number(value: float) -> str:
    """Format a number with four significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def size(count: int | None) -> str:
    return "" if count is None else show_bytes(count)
