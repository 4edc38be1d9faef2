"""The conformance check of keys, values and embeddings that states hand out, for engines with and without them."""

from __future__ import annotations

import numpy as np

from edgekit.contracts.engine import CachedKV, Chunk, Engine
from edgekit.contracts.feeding import feed
from edgekit.testing.judging import Judge, refused, require, storage_for, words


def check_cached_keys_are_those_of_the_tokens(engine: Engine, judge: Judge) -> None:
    """Cached keys do not depend on chunks or rewinding, and follow evictions; reading them changes no logits."""
    able = engine.capabilities
    tokens = words(engine, np.random.default_rng(11), 14)
    state = engine.start(storage_for(engine))
    feed(engine, state, tokens[:12])
    if not able.kv_layers:
        refused(lambda: state.cached(0, 0, 1), "keys and values of an engine that gives none")
        refused(lambda: state.embedded(tokens[:1]), "embeddings of an engine that gives none")
        return
    layer = able.kv_layers[-1]
    whole = _copied(state.cached(layer, 0, 12))
    require(
        whole.keys.dtype == whole.values.dtype == np.float32 and whole.keys.shape == whole.values.shape,
        "keys and values differ in shape, or are not in float32",
    )
    require(whole.keys.shape[1] == 12 and np.unique(whole.keys, axis=1).shape[1] > 1, "keys of other tokens")
    require(state.next_position >= state.length, "the next position lies among the cached ones")
    _same(judge, state.cached(layer, 5, 9), whole, slice(5, 9), "a part of the tokens")
    refused(lambda: state.cached(max(able.kv_layers) + 1, 0, 1), "keys of a layer without")
    for start, stop in ((-1, 3), (4, 4), (3, 13)):
        refused(lambda: state.cached(layer, start, stop), f"keys of tokens {start} to {stop} of 12")  # noqa: B023
    logits = engine.forward([Chunk(state, tokens[12:13], 1)])[0]
    other = engine.start(storage_for(engine)) if able.max_states > 1 else None
    if other is not None:
        for token in tokens[:12]:
            engine.forward([Chunk(other, [token], 0)])
        _same(judge, other.cached(layer, 0, 12), whole, slice(0, 12), "tokens that were fed one by one")
        judge.same(engine.forward([Chunk(other, tokens[12:13], 1)])[0], logits, "logits after keys were read")
        other.close()
    if able.max_rewind is None or able.max_rewind >= 1:
        state.rewind(1)
        engine.forward([Chunk(state, tokens[13:14], 0)])
        _same(judge, state.cached(layer, 0, 12), whole, slice(0, 12), "tokens before a rewind")
    if able.can_evict and able.checkpoint_tokens is None:
        state.evict(2, 5)
        later = _copied(state.cached(layer, 2, state.length))
        require(later.values.shape[1] == state.length - 2, "values of evicted tokens")
        judge.same(later.values[:, :7], whole.values[:, 5:12], "values after an eviction")
    rows = state.embedded(tokens)
    require(rows.dtype == np.float32 and rows.ndim == 2 and len(rows) == len(tokens), "embeddings of other tokens")
    for index, token in enumerate(tokens):
        judge.same(state.embedded([token]), rows[index : index + 1], "embeddings of single tokens")
    require(len(np.unique(rows, axis=0)) == len(set(tokens)), "tokens have the embeddings of others")
    refused(lambda: state.embedded([able.vocabulary]), "the embedding of a token outside the vocabulary")
    state.close()


def _copied(kv: CachedKV) -> CachedKV:
    return CachedKV(np.array(kv.keys), np.array(kv.values))


def _same(judge: Judge, found: CachedKV, expected: CachedKV, part: slice, what: str) -> None:
    judge.same(found.keys, expected.keys[:, part], f"keys of {what}")
    judge.same(found.values, expected.values[:, part], f"values of {what}")
