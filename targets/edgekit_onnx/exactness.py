"""The rule of exact mode: how many tokens and rows go into a call, so that no row's result depends on its company.

onnxruntime rounds a single row by another path than several, and blocks above 32 take rows in pairs. So no call has one
token, and where blocks are larger every call is even; what is fed beside the real tokens is forgotten again.
"""

from __future__ import annotations

from edgekit.model import ModelSpec
from edgekit.plan import Plan
from edgekit.recipe import Recipe

SINGLE_BLOCK = 32  # with it, rows are computed one by one; with others, two by two
INEXACT_CACHE = (
    "exact mode needs 32-bit keys and values: with 16 bits a token sees the tokens of its own call before they are "
    "rounded, so its result depends on how it was chunked; plan with kv_bits 32"
)


def can_be_exact(plan: Plan) -> bool:
    """Whether exact mode can keep its promise for this artifact."""
    return plan.storage.kv_bits == 32


def works_in_pairs(model: ModelSpec, recipe: Recipe) -> bool:
    """Whether any product may take rows in pairs: all but those whose blocks are of 32."""
    groups = {recipe.format_of(tensor).group for tensor in model.tensors() if tensor.role == "linear"}
    return groups != {SINGLE_BLOCK}


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
