"""The rule of exact mode: the tokens and rows of a call are padded so that no result depends on what it ran with.

onnxruntime computes a single row by other kernels than several, and with blocks above 32 it takes rows in pairs. So no
call has one token, and with larger blocks every call has an even number. Padding is dropped after the call.
"""

from __future__ import annotations

from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import Recipe
from edgekit.model.spec import ModelSpec

SINGLE_BLOCK = 32  # with it, rows are computed one at a time; with larger blocks, two at a time
EXACT_BITS = (32, 8)
INEXACT_CACHE = (
    "exact mode needs keys and values of 32 or 8 bits: with 16 a token sees the tokens of its own call before they are "
    "rounded, so its result depends on how it was chunked; plan with kv_bits 32"
)

NOT_HERE = (
    "exact mode does not hold on this machine: onnxruntime's kernels gave different bits for the same tokens in "
    "different pieces; open without exact"
)


def can_be_exact(plan: Plan) -> bool:
    """True where exact mode can hold for this artifact's cache."""
    return plan.storage.kv_bits in EXACT_BITS


def works_in_pairs(model: ModelSpec, recipe: Recipe) -> bool:
    """True where a product may take rows in pairs: unless all blocks have 32 values."""
    groups = {recipe.format_of(tensor).group for tensor in model.tensors() if tensor.role == "linear"}
    return groups != {SINGLE_BLOCK}


def padded_tokens(tokens: int, pairs: bool) -> int:
    """The number of tokens to feed, padding included."""
    return max(2, tokens + tokens % 2 if pairs else tokens)


def spare_rows(tokens: int, rows: int, fed: int) -> tuple[int, int]:
    """A range of hidden states that contains the last `rows` of `tokens`: of even size where `fed` allows."""
    start, stop = tokens - rows, tokens
    if rows % 2 and stop < fed:
        return start, stop + 1
    if rows % 2 and start > 0:
        return start - 1, stop
    return start, stop
