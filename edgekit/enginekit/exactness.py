"""The check that results do not depend on how tokens were chunked, on this machine's kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from edgekit.common.machine_facts import read_fact, write_fact
from edgekit.contracts.engine import Chunk, Engine, State
from edgekit.contracts.feeding import probe_tokens
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.errors import Unsupported

CHECKED_TOKENS = 24
_CHECK = 2  # of facts: 1 compared the last row alone
# The pieces of a text, and the most rows of logits that are asked for after each.
PIECES = (([24], 24), ([8, 8, 8], 1), ([7, 1, 1, 5, 2, 8], 3), ([1] * 24, 1))


def holds_here(
    engine: Engine, storage: KVCacheConfig, start_state: Callable[[KVCacheConfig], State] | None = None
) -> bool:
    """Check this machine's kernels: True where pieces of a text, and rows asked for, do not change a bit of any row."""
    count = min(CHECKED_TOKENS, storage.capacity_tokens)
    tokens = probe_tokens(count, engine.abilities.vocabulary)
    expected: dict[int, Any] = {}  # by position
    for sizes, most_rows in PIECES:
        state, fed = (start_state or engine.start)(storage), 0
        for size in sizes:
            for start in range(fed, min(fed + size, count), engine.abilities.max_chunk_tokens):
                stop = min(start + engine.abilities.max_chunk_tokens, fed + size, count)
                rows = min(most_rows, stop - start)
                answer = engine.forward([Chunk(state, tokens[start:stop], rows)])[0]
                for position, row in zip(range(stop - rows, stop), answer, strict=True):
                    if not np.array_equal(expected.setdefault(position, row.copy()), row):
                        state.close()
                        return False
            fed += size
        state.close()
    return True


def check_once(
    engine: Engine,
    storage: KVCacheConfig,
    start_state: Callable[[KVCacheConfig], State],
    *,
    key: str,
    name: str,
    versions: Mapping[str, Any],
    refusal: str,
) -> None:
    """Check this machine's kernels unless its facts say that they hold; close the engine and refuse where they do not.

    Args:
        key: the artifact and the library, as `EngineBase.model_key` has them.
        name: the name of the fact, one for each cache width.
        versions: what the result depends on besides; a fact with others is measured anew.
        refusal: the message.
    """
    fact = {"holds": True, "check": _CHECK, **versions}
    if read_fact(key, name) == fact:
        return
    if not holds_here(engine, storage, start_state):
        engine.close()
        raise Unsupported(refusal)
    write_fact(key, name, fact)
