"""The table of rejected layouts, as plain text for a terminal or a log."""

from __future__ import annotations

from collections.abc import Sequence

from edgekit.apps.handover.server_plan import RejectedLayout
from edgekit.common.units import show_bytes

LAYOUT_HEAD = ("gpus", "layout", "a GPU", "tok/s each", "why not → the smallest change that helps")


def layout_table(rejected: Sequence[RejectedLayout]) -> str:
    """Return one line for each failure."""
    rows = [LAYOUT_HEAD, *(row for each in rejected for row in layout_rows(each))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(LAYOUT_HEAD) - 1)]
    lines = (
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def layout_rows(rejected: RejectedLayout) -> list[tuple[str, ...]]:
    """Return the row of a layout with its first failure, then a row for each further one."""
    why = [
        f"{failure.what}: {failure.found}, allowed {failure.allowed} → {failure.cure}" for failure in rejected.failures
    ]
    first = (
        f"{rejected.gpu}x{rejected.layout.gpus}",
        str(rejected.layout),
        show_bytes(rejected.memory.total_bytes) if rejected.memory else "",
        f"{rejected.speed.tokens_per_s_each:g}" if rejected.speed else "",
        (why or [rejected.reason])[0],
    )
    return [first, *(("", "", "", "", line) for line in why[1:])]
