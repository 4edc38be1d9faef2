"""The table of what was tried, as plain text that fits a terminal and a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgekit.plan import Rejected
from edgekit.units import show_bytes

_HEAD = ("target", "backend", "recipe", "memory", "charged", "tok/s", "quality", "why not, and the cure")


def table_of(rejected: Mapping[str, Sequence[Rejected]]) -> str:
    """One block a device, one line a failure."""
    blocks = []
    for device, options in rejected.items():
        rows = [_HEAD, *(row for option in options for row in rows_of(option))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
            for row in rows
        ]
        blocks.append("\n".join([f"{device}:", *(f"  {line}" for line in lines)]))
    return "\n\n".join(blocks)


def rows_of(option: Rejected) -> list[tuple[str, ...]]:
    """An option with its first failure, then a line for each other one."""
    why = [
        f"{failure.what}: {failure.found}, allowed {failure.allowed} → {failure.cure}" for failure in option.failures
    ]
    estimate, speed, quality = option.estimate, option.speed, option.quality
    first = (
        option.target,
        option.backend,
        option.recipe,
        show_bytes(estimate.total_bytes) if estimate else "",
        show_bytes(estimate.private_bytes) if estimate else "",
        f"{speed.decode_tokens_per_s:g}" if speed else "",
        f"{quality.same_top:.3f}" if quality else "",
        (why or [option.reason])[0],
    )
    return [first, *(("",) * (len(_HEAD) - 1) + (line,) for line in why[1:])]
