"""The rule of exact mode: nothing is computed for a single token.

Without flash attention llama.cpp computes every row of two or more by the same sums, whatever ran beside it; a lone row
takes other kernels. So a lone token is fed with a spare behind it, which is dropped before the next call, and logits
are computed for two tokens where one is asked for, because the last layer runs for those tokens alone. The sequences of
a call have equal numbers of tokens: uneven ones are run in pieces. What has other kernels fails the check at open.
"""

from __future__ import annotations

from edgekit.contracts.plan import Plan

LEAST_EXACT = 2  # tokens of a sequence in a call, and rows of logits
SPARE_TOKENS = LEAST_EXACT - 1
EXACT_BITS = (32, 16)
INEXACT_CACHE = (
    "llamacpp: exact mode needs keys and values of 32 or 16 bits: narrower ones need flash attention, whose results "
    "depend on how tokens are chunked; plan with kv_bits 16"
)
NOT_HERE = (
    "llamacpp: exact mode does not hold on this machine: llama.cpp's kernels gave different bits for the same tokens "
    "in different pieces; open without exact"
)


def can_be_exact(plan: Plan) -> bool:
    """True where exact mode can hold for this artifact's cache."""
    return plan.storage.kv_bits in EXACT_BITS
