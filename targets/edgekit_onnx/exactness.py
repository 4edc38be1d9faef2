"""The rule of exact mode: tokens and rows of a call are padded so that results do not depend on the call's shape.

onnxruntime uses other kernels for a single row than for several. It takes rows in pairs (products with blocks above 32)
or in larger blocks of even size (attention), of which the last may be such a single row. So the number of tokens in a
call is even. Padding is dropped after the call. Where this does not suffice, a call has a single token.
"""

from __future__ import annotations

import platform

from edgekit.contracts.plan import Plan
from edgekit.contracts.recurrent import is_recurrent
from edgekit.errors import Unsupported
from edgekit_onnx.int8_kv import BITS as INT8_BITS

EXACT_BITS = (32, 8)
INEXACT_CACHE = (
    "exact mode needs keys and values of 32 or 8 bits: with 16 a token sees the tokens of its own call before they are "
    "rounded, so its result depends on how it was chunked; plan with kv_bits 32"
)
SINGLE_RECURRENT = (
    "exact mode feeds one token a call, as for every model with experts or on arm64, which the recurrent part of this "
    "model's layers does not allow; open without exact"
)
WIDEST_HEAD = 128  # values, of which onnxruntime takes a sum in one piece
WIDE_HEADS = (
    "exact mode needs a cache of 8 bits here: this model's heads have more than 128 values, and onnxruntime sums their "
    "scores in pieces that depend on the number of keys; open with kv_bits 8"
)

NOT_HERE = (
    "exact mode does not hold on this machine: onnxruntime's kernels gave different bits for the same tokens in "
    "different pieces; open without exact"
)


def is_arm64() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")


def feeds_single_tokens(plan: Plan) -> bool:
    """Return True if a call of exact mode has one token, instead of an even number.

    An expert computes the tokens of a call that are routed to it; their number decides its kernel. Kernels for arm64
    compute differently for different even numbers too.
    """
    return plan.model.experts is not None or is_arm64()


def inexact(plan: Plan) -> str | None:
    """Return the reason why exact mode is not possible with this artifact; None if it is."""
    if feeds_single_tokens(plan) and is_recurrent(plan.model):
        return SINGLE_RECURRENT
    return None if plan.storage.kv_bits in EXACT_BITS else INEXACT_CACHE


def has_wide_heads(plan: Plan) -> bool:
    """Return True if only a cache of 8 bits is exact, whose graphs have attention of our own."""
    return plan.backend == "cpu" and any(layer.head_dim > WIDEST_HEAD for layer in plan.model.layers)


def check_exact_bits(plan: Plan, kv_bits: int) -> None:
    """Raise `Unsupported` if exact mode cannot hold with a cache of this width."""
    if kv_bits not in EXACT_BITS:
        raise Unsupported(INEXACT_CACHE)
    if kv_bits != INT8_BITS and has_wide_heads(plan):
        raise Unsupported(WIDE_HEADS)


def padded_tokens(tokens: int) -> int:
    """Return the number of tokens to feed, including padding."""
    return tokens + tokens % 2


def spare_rows(tokens: int, rows: int, fed: int) -> tuple[int, int]:
    """Return a range of hidden states with the last `rows` of `tokens`, of even size if `fed` allows it."""
    start, stop = tokens - rows, tokens
    if rows % 2 and stop < fed:
        return start, stop + 1
    if rows % 2 and start > 0:
        return start - 1, stop
    return start, stop
