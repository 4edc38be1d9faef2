"""Conformance checks of windows that keep tokens by scores: what they keep depends on the text and the policy alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from edgekit.contracts.engine import Chunk, Engine
from edgekit.contracts.feeding import feed
from edgekit.contracts.kv_policy import Eviction, KVEvictionPolicy
from edgekit.enginekit.keeping import ATTENTION, scorers_for
from edgekit.testing.judging import CAPACITY, Judge, refused, require, storage_for, words

if TYPE_CHECKING:
    from edgekit.contracts.engine import Logits

SINKS, LENGTH = 4, 2 * CAPACITY


def check_several_spans_leave_at_once(engine: Engine, judge: Judge) -> None:
    """Evicting spans together equals evicting one after the other."""
    if not engine.capabilities.can_evict:
        return
    random = np.random.default_rng(11)
    tokens, ending = words(engine, random, 40), words(engine, random, 3)
    spans = [Eviction(4, 9), Eviction(12, 13), Eviction(20, 30)]
    state = engine.start(storage_for(engine))
    feed(engine, state, tokens, 0)
    refused(lambda: state.evict_spans([spans[1], spans[0]]), "spans that are not in order")
    refused(lambda: state.evict_spans([Eviction(4, 9), Eviction(8, 10)]), "spans with a common token")
    state.evict_spans(spans)
    require((state.position, state.length) == (40, 24), f"{state.length} tokens are left of 40 without 16")
    together = feed(engine, state, ending, 1)
    state.close()
    single = engine.start(storage_for(engine))
    feed(engine, single, tokens, 0)
    for span in reversed(spans):
        single.evict(*span)
    one_by_one = feed(engine, single, ending, 1)
    single.close()
    # Keys are rotated once or three times, which rounds differently, also in exact mode, and most with few bits.
    Judge(False, max(judge.tolerance, 0.05), False, 0, False).same(
        together, one_by_one, "several spans evicted together"
    )


def check_kept_tokens_depend_on_the_text(engine: Engine, judge: Judge) -> None:
    """Under every scorer, text gives the same logits again, also if the window was saved and restored in between.

    An exact engine gives them for any chunks, and after wrong drafts.
    """
    able = engine.capabilities
    random = np.random.default_rng(12)
    state = engine.start(storage_for(engine))
    feed(engine, state, words(engine, random, 8), 0)
    refused(lambda: state.scores("no-such-scorer", 0), "a scorer that is not offered")
    if able.scorers:
        refused(lambda: state.scores(able.scorers[0], 8), "scores of no tokens")
    if attending := [scorer for scorer in scorers_for(ATTENTION) if scorer in able.scorers]:
        refused(lambda: state.scores(attending[0], 0), "scores by the attention of tokens that are not given")
        refused(lambda: state.scores(attending[0], 0, [0] * 9), "scores by more tokens than are cached")
    state.close()
    for scorer in able.scorers:
        policy = KVEvictionPolicy.of(CAPACITY, SINKS, scorer)
        tokens = words(engine, random, LENGTH)
        expected = _read(engine, policy, tokens, 5)
        judge.same(_read(engine, policy, tokens, 5), expected, f"the same text again, kept by {scorer}")
        if able.can_save_evicted:
            judge.same(_read(engine, policy, tokens, 5, saves=True), expected, f"{scorer}: saved and restored")
        if judge.exact:
            for chunk in (1, 3, 16):
                judge.same(_read(engine, policy, tokens, chunk), expected, f"{scorer}: chunks of {chunk}")
            if able.max_rewind is None:
                judge.same(_read(engine, policy, tokens, 5, drafts=True), expected, f"{scorer}: wrong drafts")


def _read(
    engine: Engine,
    policy: KVEvictionPolicy,
    tokens: Sequence[int],
    chunk: int,
    *,
    saves: bool = False,
    drafts: bool = False,
) -> Logits:
    """Feed tokens in chunks, cut where the policy evicts, and return the last logits.

    `saves`: go on in another state after each eviction. `drafts`: feed wrong tokens after each chunk; take them back.
    """
    state = engine.start(storage_for(engine))
    fed = 0
    while fed < len(tokens):
        if policy.make_room(state, tokens) and saves:
            segment = state.save(0, state.length)
            state.close()
            state = engine.start(storage_for(engine))
            state.restore(segment)
        room = policy.remaining_capacity(state.length) or chunk
        count = min(chunk, room, engine.capabilities.max_chunk_tokens, len(tokens) - fed)
        logits = np.array(engine.forward([Chunk(state, tokens[fed : fed + count], 1)])[0])
        fed += count
        wrong = min(3, policy.remaining_capacity(state.length) or 0) if drafts else 0
        if wrong:
            engine.forward([Chunk(state, [0] * wrong, 1)])
            state.rewind(wrong)
    require(state.position == len(tokens) and state.length <= CAPACITY, "a window holds more than its tokens")
    state.close()
    return logits
