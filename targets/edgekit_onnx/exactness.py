"""The rule of exact mode: how many tokens and rows go into a call, so that no row's result depends on its company.

onnxruntime rounds a single row by another path than several, and blocks above 32 take rows in pairs. So no call has one
token, and where blocks are larger every call is even; what is fed beside the real tokens is forgotten again.
"""

from __future__ import annotations

from collections.abc import Iterable

PAIRED_BLOCK = 32  # above it, rows are computed two at a time


def works_in_pairs(blocks: Iterable[int]) -> bool:
    """Whether any product has blocks that take rows in pairs; 0 stands for floats."""
    return any(block != PAIRED_BLOCK for block in blocks)


def padded_tokens(tokens: int, pairs: bool) -> int:
    """Tokens to feed in place of `tokens`."""
    return max(2, tokens + tokens % 2 if pairs else tokens)


def spare_rows(tokens: int, rows: int, fed: int) -> tuple[int, int]:
    """Rows of hidden states, an even number where there are so many, that hold the last `rows` of `tokens`."""
    start, stop = tokens - rows, tokens
    if rows % 2 and stop < fed:
        return start, stop + 1
    if rows % 2 and start > 0:
        return start - 1, stop
    return start, stop
