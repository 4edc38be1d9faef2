"""The rule of exact mode: never compute a single row.

Without flash attention, llama.cpp computes each of two or more rows by the same sums, whatever the other rows are; a
single row uses other kernels. So a lone token is fed with a padding token, which is dropped before the next call, and
at least two rows of logits are computed, because the last layer runs only for tokens with logits. The sequences of a
call have equal numbers of tokens; uneven ones are run in pieces. Machines with other kernels fail the check at open.
"""

from __future__ import annotations

from edgekit.contracts.plan import Plan

LEAST_EXACT = 2  # tokens of a sequence in a call, and logit rows
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
    """Return True if exact mode is possible with this artifact's cache."""
    return plan.storage.kv_bits in EXACT_BITS
