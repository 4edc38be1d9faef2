"""Scorers find the tokens that differ; policies drop the spans of the least scores, between sinks and newest tokens."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from edgekit.contracts.kv_policy import SPAN, KVCacheConfig, KVEvictionPolicy, apply_limits
from edgekit.enginekit.keeping import (
    ATTENTION,
    CACHE,
    ByAttention,
    ByCache,
    attended,
    consensus,
    find_scorer,
    scorers,
    scorers_for,
)
from edgekit.errors import InvalidInput, UnknownName, Unsupported
from edgekit.runtime.request import check_cache
from edgekit.testing import FakeEngine

RANDOM = np.random.default_rng(4)


def layers(tokens: int, odd: slice) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys and values of two layers that point one way but for the `odd` tokens."""
    found = []
    for _ in range(2):
        pair = RANDOM.normal(0, 0.3, (2, 3, tokens, 16)).astype(np.float32) + RANDOM.normal(0, 1, (2, 3, 1, 16))
        pair[:, :, odd] = RANDOM.normal(0, 1.5, pair[:, :, odd].shape)
        found.append((pair[0].astype(np.float16), pair[1].astype(np.float16)))
    return found


@pytest.mark.parametrize("name", scorers_for(CACHE))
def test_a_scorer_prefers_the_tokens_that_differ(name: str) -> None:
    cached = layers(200, slice(40, 48))
    scorer = scorers()[name]
    assert isinstance(scorer, ByCache)
    scores = consensus(scorer, cached)
    assert scores.dtype == np.float32 and scores.shape == (200,) and np.isfinite(scores).all()
    assert scores[40:48].mean() > np.quantile(scores, 0.9)
    np.testing.assert_array_equal(scores, consensus(scorer, [(keys.copy(), values.copy()) for keys, values in cached]))


def test_values_that_are_no_numbers_have_finite_scores() -> None:
    keys = np.full((1, 70, 4), np.nan, np.float32)
    for scorer in scorers().values():
        if isinstance(scorer, ByCache):
            assert np.isfinite(consensus(scorer, [(keys, keys)])).all()
            assert np.isfinite(consensus(scorer, [(keys, np.zeros_like(keys))])).all()
        else:
            assert np.isfinite(attended(scorer, [keys[:, :, 0]])).all()
    with pytest.raises(UnknownName):
        find_scorer("no-such")


@pytest.mark.parametrize("name", scorers_for(ATTENTION))
def test_a_scorer_prefers_the_tokens_that_are_attended_to(name: str) -> None:
    scorer = scorers()[name]
    assert isinstance(scorer, ByAttention)
    attention = RANDOM.random((2, 3, 200)).astype(np.float32)
    attention[:, :, 40:48] += 2
    scores = attended(scorer, list(attention))
    assert scores.dtype == np.float32 and scores.shape == (200,)
    assert scores[42:46].min() > np.delete(scores, range(36, 52)).max()


@settings(deadline=None, max_examples=60)
@given(st.integers(32, 600), st.integers(0, 8), st.integers(0, 9))
def test_a_policy_drops_the_least_spans(size: int, sinks: int, seed: int) -> None:
    policy = KVEvictionPolicy.of(size + sinks, sinks, "scored")
    scores = np.random.default_rng(seed).random(size).tolist()
    spans = policy.least(scores)
    dropped = {token - sinks for span in spans for token in range(*span)}
    assert len(dropped) == policy.block and max(dropped) < size - policy.protected
    totals = {place: sum(scores[place : place + SPAN]) for place in range(0, size - policy.protected - SPAN + 1, SPAN)}
    kept = [total for place, total in totals.items() if place not in dropped]
    assert min(kept) >= max(total for place, total in totals.items() if place in dropped)
    assert all(one.stop < other.start for one, other in pairwise(spans))


def test_what_cannot_be_kept_is_refused_by_name() -> None:
    whole, storage = KVEvictionPolicy(), KVCacheConfig(capacity_tokens=512, kv_bits=16)
    with pytest.raises(InvalidInput, match="keep belongs to a window"):
        apply_limits(whole, storage, None, None, 0, "scored")
    with pytest.raises(InvalidInput, match="too small to keep tokens by scores"):
        apply_limits(whole, storage, None, 32, 4, "scored")
    with pytest.raises(ValidationError):
        KVEvictionPolicy(window=64, block=9, keep="valuediff")
    policy, _ = apply_limits(whole, storage, None, 64, 4, "scored")
    assert policy.keep == "valuediff"  # an artifact keeps what it was planned with
    with pytest.raises(Unsupported, match="16 bits or more"):
        check_cache(policy, FakeEngine().capabilities, 8)
    with pytest.raises(Unsupported, match="cannot keep tokens by valuediff"):
        check_cache(policy, FakeEngine().capabilities.model_copy(update={"scorers": ()}), 16)
    with pytest.raises(Unsupported, match="no-such"):
        check_cache(KVEvictionPolicy.of(64, 4, "no-such"), FakeEngine().capabilities, 16)
    without = FakeEngine().capabilities.model_copy(update={"scorers": scorers_for(CACHE)})
    with pytest.raises(Unsupported, match=r"by snapkv; it can by newest, valuediff$"):
        check_cache(KVEvictionPolicy.of(64, 4, "snapkv"), without, 16)
    if_opened = without.model_copy(update={"scorers_on_request": scorers_for(ATTENTION)})
    with pytest.raises(Unsupported, match="snapkv needs a runtime that was opened for it"):
        check_cache(KVEvictionPolicy.of(64, 4, "snapkv"), if_opened, 16)
