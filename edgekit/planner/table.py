"""The table of rejected candidates, as plain text for a terminal or a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgekit.common.units import show_bytes
from edgekit.contracts.plan import Rejected

_HEAD = ("target", "backend", "recipe", "memory", "charged", "tok/s", "quality", "why not, and the fix")


def table_of(rejected: Mapping[str, Sequence[Rejected]]) -> str:
    """Return one block per device with one line per failure."""
    blocks = []
    for device, candidates in rejected.items():
        rows = [_HEAD, *(row for candidate in candidates for row in rows_of(candidate))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
            for row in rows
        ]
        blocks.append("\n".join([f"{device}:", *(f"  {line}" for line in lines)]))
    return "\n\n".join(blocks)


def distance(candidate: Rejected) -> tuple[int, int]:
    """Return how far a candidate is from passing, as a sort key: the failures, then the bytes."""
    return len(candidate.failures), candidate.estimate.total_bytes if candidate.estimate else 0


def rows_of(candidate: Rejected) -> list[tuple[str, ...]]:
    """Return the row of a candidate with its first failure, then a row for each further one."""
    why = [
        f"not offered: {failure.found}"  # the target says why, and what to choose instead
        if failure.what == "offer"
        else f"{failure.what}: {failure.found}, allowed {failure.allowed} → {failure.cure}"
        for failure in candidate.failures
    ]
    estimate, speed, quality = candidate.estimate, candidate.speed, candidate.quality
    first = (
        candidate.target,
        candidate.backend,
        candidate.recipe,
        show_bytes(estimate.total_bytes) if estimate else "",
        show_bytes(estimate.private_bytes) if estimate else "",
        speed.decode.show() if speed else "",
        quality.show() if quality else "",
        (why or [candidate.reason])[0],
    )
    return [first, *(("",) * (len(_HEAD) - 1) + (line,) for line in why[1:])]
