"""Checks that this machine's kernels give the same logits, bit for bit, however tokens are chunked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

from edgekit.common.machine_facts import is_marked, mark
from edgekit.contracts.engine import Chunk, Engine, State
from edgekit.contracts.feeding import probe_tokens
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.errors import Unsupported

CHECKED_TOKENS = 80  # beyond 64 keys, kernels split sums differently
# Version of stored facts. Version 1 compared only the last row, version 2 only 24 tokens, and version 3 made no call of
# 64 tokens on engines that cut calls for their rows: llama.cpp's flash attention takes other kernels from there on.
_CHECK = 4
# Sizes of a text's pieces, and the maximum of logit rows requested per chunk.
PIECES = (
    ([24, 56], 24),
    ([80], 16),
    ([80], 1),
    ([8, 8, 8, 40, 16], 1),
    ([7, 1, 1, 5, 2, 8, 33, 9, 3, 2, 9], 3),
    ([1] * 80, 1),
)


def holds_here(
    engine: Engine, storage: KVCacheConfig, start_state: Callable[[KVCacheConfig], State] | None = None
) -> bool:
    """Return True if neither chunk sizes nor the number of requested rows change a bit of any logit row."""
    count = min(CHECKED_TOKENS, storage.capacity_tokens)
    tokens = probe_tokens(count, engine.capabilities.vocabulary)
    expected: dict[int, bytes] = {}  # hashes of rows by position, since rows of a large vocabulary take megabytes
    for sizes, most_rows in PIECES:
        state, fed = (start_state or engine.start)(storage), 0
        for size in sizes:
            for start in range(fed, min(fed + size, count), engine.capabilities.max_chunk_tokens):
                stop = min(start + engine.capabilities.max_chunk_tokens, fed + size, count)
                rows = min(most_rows, stop - start)
                answer = engine.forward([Chunk(state, tokens[start:stop], rows)])[0]
                for position, row in zip(range(stop - rows, stop), answer, strict=True):
                    found = blake2b(row.tobytes()).digest()
                    if expected.setdefault(position, found) != found:
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
    """Check the kernels unless a mark says that they held. On failure, close the engine and raise.

    Args:
        key: `EngineBase.model_key`, the key of the mark.
        name: the name of the mark, one per cache width.
        versions: further dependencies of the result; other values in a stored mark lead to a new check.
        refusal: the message of the `Unsupported` that a failure raises.
    """
    held = {"holds": True, "check": _CHECK, **versions}
    if is_marked(key, name, held):
        return
    if not holds_here(engine, storage, start_state):
        engine.close()
        raise Unsupported(refusal)
    mark(key, name, held)
