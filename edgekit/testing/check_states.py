"""Conformance checks of what states hand out, write to files and follow: segments, keys, features, recurrent parts."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgekit.contracts.engine import CachedKV, Chunk, Engine, State
from edgekit.contracts.feeding import feed
from edgekit.testing.judging import CAPACITY, Judge, refused, require, storage_for, words

if TYPE_CHECKING:
    from edgekit.contracts.engine import Features, Logits, Segment


def check_segments_survive_the_disk(engine: Engine, judge: Judge) -> None:
    """A written segment reads back and gives the same logits; a damaged one is refused."""
    able = engine.capabilities
    state = engine.start(storage_for(engine))
    tokens = words(engine, np.random.default_rng(6), 10)
    feed(engine, state, tokens, 0)
    if not able.can_save:
        refused(lambda: state.save(0, 4), "save on an engine that says it cannot")
        return
    segment = state.save(3, 8)
    require(segment.tokens == 5 and segment.bytes > 0, "a segment does not know its size")
    expected = feed(engine, state, [1], 1)
    state.close()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "segment"
        segment.write(path)
        again = engine.start(storage_for(engine))
        feed(engine, again, tokens[:3], 0)
        again.restore(engine.read_segment(path))
        judge.same(feed(engine, again, [*tokens[8:], 1], 1), expected, "restored from disk")
        again.close()
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        refused(lambda: engine.read_segment(path), "a segment cut short by a byte")
        path.write_bytes(b"")
        refused(lambda: engine.read_segment(path), "an empty segment")
    small = engine.start(storage_for(engine, 4))
    refused(lambda: small.restore(segment), "a segment larger than the state")


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


def check_features(engine: Engine, judge: Judge) -> None:
    """Hidden states do not depend on how tokens were chunked, and requesting them does not change logits."""
    able = engine.capabilities
    tokens = words(engine, np.random.default_rng(10), 12)

    def asked(state: State, start: int, stop: int) -> tuple[Logits, Features]:
        hidden = np.full((stop - start, able.feature_width or 1), np.nan, np.float32)
        return engine.forward([Chunk(state, tokens[start:stop], 1, features=hidden)])[0], hidden

    if not able.feature_layers:
        refused(lambda: asked(engine.start(storage_for(engine)), 0, 1), "hidden states of an engine that gives none")
        return
    plain = engine.start(storage_for(engine))
    expected = feed(engine, plain, tokens, 1)
    plain.close()
    rows = []
    for size in (len(tokens), 5, 1):
        state, parts = engine.start(storage_for(engine)), []
        for start in range(0, len(tokens), min(size, able.max_chunk_tokens)):
            logits, hidden = asked(state, start, min(start + min(size, able.max_chunk_tokens), len(tokens)))
            parts.append(hidden)
        judge.same(logits, expected, f"logits with hidden states, in chunks of {size}")
        rows.append(np.concatenate(parts))
        judge.same(rows[-1], rows[0], f"hidden states in chunks of {size}")
        state.close()
    if able.max_rewind is None or able.max_rewind >= 3:
        state = engine.start(storage_for(engine))
        feed(engine, state, tokens)
        state.rewind(3)
        _, hidden = asked(state, len(tokens) - 3, len(tokens))
        judge.same(hidden, rows[0][-3:], "hidden states after a rewind")
        state.close()
    require(bool(np.isfinite(rows[0]).all()) and len(np.unique(rows[0], axis=0)) > 1, "hidden states were not written")
    states = [engine.start(storage_for(engine)) for _ in range(min(3, able.max_states))]
    for state in states:
        feed(engine, state, tokens[:-1])
    lasts = [np.empty((1, able.feature_width), np.float32) for _ in states]
    silent = len(states) // 2 if len(states) > 1 else None  # requests no hidden states in the same call
    engine.forward([Chunk(s, tokens[-1:], 1, features=None if i == silent else lasts[i]) for i, s in enumerate(states)])
    for index, last in enumerate(lasts):
        if index != silent:
            judge.same(last, rows[0][-1:], "hidden states of one batch", batched=True)
    for state in states:
        state.close()
    narrow = np.empty((1, able.feature_width + 1), np.float32)
    refused(
        lambda: engine.forward([Chunk(engine.start(storage_for(engine)), [1], 0, features=narrow)]), "too wide an array"
    )


def check_a_recurrent_part_follows(engine: Engine, judge: Judge) -> None:
    """After rewinds, restores and verified drafts, a state with a recurrent part gives the logits of plain decoding.

    It replays at most the tokens since the last checkpoint; without a recurrent part, none.
    """
    spacing, limit = engine.capabilities.checkpoint_tokens, engine.capabilities.max_rewind
    if spacing is None:
        state = engine.start(storage_for(engine))
        feed(engine, state, [1, 2, 3], 0)
        require(state.num_replayed == 0, "a state replays tokens, yet capabilities.checkpoint_tokens is none")
        state.close()
        return
    random = np.random.default_rng(10)
    length = min(CAPACITY - 12, 3 * spacing + spacing // 2)
    tokens = words(engine, random, length + 8)
    plain = engine.start(storage_for(engine))
    expected = feed(engine, plain, tokens, 8, chunk_tokens=1)
    plain.close()
    state = engine.start(storage_for(engine))
    feed(engine, state, tokens[:length], 0)
    if limit is None or limit >= 3:
        _check_drafts(engine, judge, state, tokens[length:], words(engine, random, 3), expected)
    if engine.capabilities.can_save:
        segment = state.save(0, length)
        require(segment.bytes == state.save_bytes(0, length), "save_bytes is not what save takes")
        state.close()
        for count in (length, length - 1, min(spacing, length), 1):
            _check_restored(engine, judge, segment, count, tokens[: length + 1], expected)
    state.close()
    if limit is None:
        _check_rewinds(engine, judge, tokens, expected)


def _check_drafts(
    engine: Engine, judge: Judge, state: State, rest: Sequence[int], wrong: Sequence[int], expected: Logits
) -> None:
    """Verify proposals whose first 0, 1 or 2 tokens are right."""
    fed = 0
    while fed < len(rest):
        right = list(rest[fed + 1 : fed + 1 + fed % 3])
        chunk = [rest[fed], *right, *wrong][: min(4, engine.capabilities.max_chunk_tokens)]
        accepted = min(len(right), len(chunk) - 1)
        rows = engine.forward([Chunk(state, chunk, len(chunk))])[0]
        state.rewind(len(chunk) - 1 - accepted)
        judge.same(rows[: accepted + 1], expected[fed : fed + accepted + 1], f"{accepted} drafts accepted after {fed}")
        require(state.num_replayed <= accepted, f"{state.num_replayed} tokens to replay of {accepted} accepted drafts")
        fed += 1 + accepted
    state.rewind(len(rest))


def _check_restored(
    engine: Engine, judge: Judge, segment: Segment, count: int, tokens: Sequence[int], expected: Logits
) -> None:
    spacing = engine.capabilities.checkpoint_tokens or 1
    state = engine.start(storage_for(engine))
    state.restore(segment.head(count))
    require(state.num_replayed < max(2, spacing), f"{state.num_replayed} tokens to replay of {count} restored")
    judge.same(feed(engine, state, tokens[count:], 1), expected[:1], f"restored {count} tokens")
    state.close()


def _check_rewinds(engine: Engine, judge: Judge, tokens: Sequence[int], expected: Logits) -> None:
    spacing, rows = engine.capabilities.checkpoint_tokens or 1, len(expected)
    state = engine.start(storage_for(engine))
    feed(engine, state, tokens, 0)
    state.rewind(rows)
    require(state.num_replayed < max(2, spacing), f"{state.num_replayed} tokens to replay after a rewind")
    judge.same(feed(engine, state, tokens[-rows:], rows), expected, "rewound")
    if engine.capabilities.can_evict:
        state.evict(0, 4)
        refused(lambda: state.rewind(1), "a rewind of a recurrent part past an eviction")
    state.close()
