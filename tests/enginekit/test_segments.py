"""Segments, checkpoints of recurrent parts, and scores by which tokens are kept."""

from __future__ import annotations

import gc
import hashlib
import json
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
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
from edgekit.enginekit.kv_segment import KeyValues, SegmentPart, read_key_values
from edgekit.enginekit.recurrent import RecurrentPart, Values
from edgekit.errors import DamagedArtifact, InvalidInput, UnknownName, Unsupported
from edgekit.runtime.request import check_cache
from edgekit.testing import FakeEngine

PARTS = [SegmentPart(2, 4, np.dtype("<f4")), SegmentPart(2, 1, np.dtype("<u4"))]


FORMS = {"8-bit": PARTS}


MAGIC = b"edgekit segment 1\n"


def segment(tokens: int = 5, start: int = 3) -> KeyValues:
    random = np.random.default_rng(0)
    arrays = [(random.random((part.rows, tokens, part.width)) * 9).astype(part.dtype) for part in PARTS]
    return KeyValues("model", "8-bit", start, arrays)


def read(path: Path, model: str = "model", capacity: int = 16) -> KeyValues:
    return read_key_values(path, [model], FORMS, capacity)


@pytest.mark.parametrize("count", [0, 2, 5])
def test_split_copies_both_parts(count: int) -> None:
    whole = segment()
    first, second = whole.split(count)
    assert (first.tokens, second.tokens, second.start) == (count, 5 - count, 3 + count)
    for one, other, both in zip(first.arrays, second.arrays, whole.arrays, strict=True):
        np.testing.assert_array_equal(np.concatenate([one, other], axis=1), both)
        assert not np.shares_memory(one, both) and not np.shares_memory(other, both)
    assert first.bytes + second.bytes == whole.bytes


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_written_segment_is_read_back(tmp_path: Path, tokens: int) -> None:
    segment(tokens).write(tmp_path / "kv")
    found = read(tmp_path / "kv")
    assert (found.start, found.tokens, found.form) == (3, tokens, "8-bit")
    for one, other in zip(found.arrays, segment(tokens).arrays, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_split_beyond_its_ends_is_refused() -> None:
    for count in (-1, 6):
        with pytest.raises(InvalidInput, match="5 tokens cannot be split"):
            segment().split(count)


HEADERS: dict[str, dict[str, Any]] = {
    "another model": {"model": "other"},
    "no such form": {"form": "2-bit"},
    "form is a list": {"form": []},
    "negative start": {"start": -1},
    "negative tokens": {"tokens": -5},
    "more tokens than a state holds": {"tokens": 14},
    "beyond the state by its start": {"start": 12},
    "a billion tokens": {"tokens": 10**9},
    "tokens as text": {"tokens": "5"},
    "tokens as truth": {"tokens": True},
    "fewer tokens than bytes": {"tokens": 4},
    "another hash": {"sha256": "0" * 64},
    "no hash": {"sha256": None},
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS)
def test_false_header_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    body = b"".join(array.tobytes() for array in segment().arrays)
    header = {"model": "model", "form": "8-bit", "start": 3, "tokens": 5, "sha256": hashlib.sha256(body).hexdigest()}
    (tmp_path / "kv").write_bytes(MAGIC + json.dumps(header).encode() + b"\n" + body)
    assert read(tmp_path / "kv").tokens == 5
    (tmp_path / "kv").write_bytes(MAGIC + json.dumps(header | change).encode() + b"\n" + body)
    with pytest.raises((InvalidInput, DamagedArtifact), match="kv: "):
        read(tmp_path / "kv")


@pytest.mark.parametrize(
    "data",
    [b"", MAGIC, b"PK\x03\x04", MAGIC + b"x" * 5000, MAGIC + b"{]\n", MAGIC + b"[1]\n", MAGIC + b"{}\n"],
    ids=["empty", "magic alone", "a zip", "endless header", "no JSON", "a list", "an empty object"],
)
def test_foreign_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "kv").write_bytes(data)
    with pytest.raises(InvalidInput, match="kv"):
        read(tmp_path / "kv")


def test_a_file_larger_than_any_segment_is_never_read(tmp_path: Path) -> None:
    with (tmp_path / "kv").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InvalidInput, match="is more than the"):
        read(tmp_path / "kv")


EMPTY = (np.zeros(3),)


class Copies:
    """Copies of a recurrent part, and how many were alive when each was made."""

    def __init__(self) -> None:
        self.alive: list[int] = []
        self._made: list[weakref.ref[np.ndarray]] = []

    def read(self) -> Values:
        gc.collect()
        self.alive.append(sum(made() is not None for made in self._made))
        copy = np.zeros(3)
        self._made.append(weakref.ref(copy))
        return (copy,)


def fed(part: RecurrentPart, position: int, count: int) -> int:
    for piece in part.pieces(position, list(range(count)), 0, 1 << 10):
        part.fed(piece)
    return position + count


def test_an_eviction_drops_checkpoints_before_it_copies() -> None:
    copies = Copies()
    part = RecurrentPart(16, 4, EMPTY, copies.read, lambda values: None)
    position = fed(part, 0, 40)
    assert copies.alive == [0, 1]
    part.evict(position)
    assert copies.alive[-1] == 0


def test_the_end_of_a_long_replay_takes_the_place_of_the_last_one() -> None:
    copies = Copies()
    part = RecurrentPart(64, 2, EMPTY, copies.read, lambda values: None)
    position = fed(part, 0, 100)
    for back, more in ((5, 30), (8, 8)):
        part.rewind(position - back)
        position = fed(part, position - back, more)
    assert copies.alive == [0, 1, 1]


def test_no_more_checkpoints_are_kept_than_are_counted() -> None:
    copies = Copies()
    part = RecurrentPart(64, 1, EMPTY, copies.read, lambda values: None)
    position = fed(part, 0, 40)
    part.evict(position)
    position = fed(part, position, 60)  # past an edge
    part.rewind(position - 5)
    position = fed(part, position - 5, 30)  # a long replay
    assert copies.alive == [0]
    part.rewind(40)
    assert part.position == 40


def test_an_edge_takes_the_place_of_a_replay_s_end() -> None:
    copies = Copies()
    part = RecurrentPart(64, 2, EMPTY, copies.read, lambda values: None)
    position = fed(part, 0, 50)
    part.rewind(position - 5)
    position = fed(part, position - 5, 30)
    assert sorted(part.checkpoints(0, 70)) == [45, 64]
    fed(part, position, 60)
    assert sorted(part.checkpoints(0, 130)) == [64, 128]
    assert max(copies.alive) <= 2


def test_the_beginning_of_a_text_is_written_as_zeros() -> None:
    copies, written = Copies(), list[Values]()
    part = RecurrentPart(64, 2, EMPTY, copies.read, written.append)
    part.rewind(fed(part, 0, 50) - 50)
    assert part.position == 0 and not written[0][0].any()


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
