"""The rule of exact mode: how many tokens and rows go into a call, so that no row's result depends on its company.

onnxruntime rounds a single row by another path than several, and blocks above 32 take rows in pairs. So no call has one
token, and where blocks are larger every call is even; what is fed beside the real tokens is forgotten again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgekit.cache import Storage
from edgekit.interfaces import Chunk, Engine, State
from edgekit.model import ModelSpec
from edgekit.plan import Plan
from edgekit.recipe import Recipe

CHECKED_TOKENS = 24
PIECES = ([24], [8, 8, 8], [7, 1, 1, 5, 2, 8], [1] * 24)
SINGLE_BLOCK = 32  # with it, rows are computed one by one; with others, two by two
EXACT_BITS = (32, 8)
INEXACT_CACHE = (
    "exact mode needs keys and values of 32 or 8 bits: with 16 a token sees the tokens of its own call before they are "
    "rounded, so its result depends on how it was chunked; plan with kv_bits 32"
)

NOT_HERE = (
    "exact mode does not hold on this machine: onnxruntime's kernels gave other bits for the same tokens in other "
    "pieces; open without exact"
)


def can_be_exact(plan: Plan) -> bool:
    """Whether exact mode can keep its promise for this artifact."""
    return plan.storage.kv_bits in EXACT_BITS


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


def holds_here(engine: Engine, storage: Storage, start_state: Callable[[Storage], State] | None = None) -> bool:
    """Whether this machine's kernels keep the rule: the same tokens in other pieces give the same bits."""
    count = min(CHECKED_TOKENS, storage.capacity_tokens)
    tokens = [(7 + index * 2_654_435_761) % engine.abilities.vocabulary for index in range(count)]
    answers = []
    for sizes in PIECES:
        state, place = (start_state or engine.start)(storage), 0
        answer = np.empty(0, np.float32)
        for size in sizes:
            for start in range(place, min(place + size, count), engine.abilities.max_chunk_tokens):
                stop = min(start + engine.abilities.max_chunk_tokens, place + size, count)
                answer = engine.forward([Chunk(state, tokens[start:stop], 1)])[0]
            place += size
        answers.append(answer)
        state.close()
    return all(np.array_equal(answers[0], answer) for answer in answers[1:])
