"""Prefix reuse: the tree against a list of token lists, and answers that never depend on it."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from runtimes import codec, make_runtime

from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.errors import DamagedArtifact, DoesNotFit, EdgekitError, InvalidInput, Unsupported
from edgekit.runtime.memory.budget import MemoryBudget
from edgekit.runtime.prefix_cache.tree import RUN_BYTES, Prefixes, PrefixKey
from edgekit.runtime.runtime import Runtime
from edgekit.testing import FakeEngine
from edgekit.testing.drafting import Drafting, ReplayDrafter

SIZE = 300
KEY = PrefixKey("", None, 16)
MANY = 1 << 20


class Run(NamedTuple):
    """A segment that is nothing but its tokens, two bytes each."""

    held: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.held)

    @property
    def bytes(self) -> int:
        return 2 * len(self.held)

    def head(self, count: int) -> Run:
        return Run(self.held[:count])

    def split(self, count: int) -> tuple[Run, Run]:
        return Run(self.held[:count]), Run(self.held[count:])

    def write(self, path: Path) -> None:
        raise NotImplementedError


class Length(NamedTuple):
    """A segment that holds nothing."""

    tokens: int
    bytes: int = 0

    def head(self, count: int) -> Length:
        return Length(count)

    def split(self, count: int) -> tuple[Length, Length]:
        return Length(count), Length(self.tokens - count)

    def write(self, path: Path) -> None:
        raise NotImplementedError


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
KEYS = st.sampled_from([KEY, PrefixKey("other", None, 16), PrefixKey("", "adapter", 16)])


def common(one: list[int], other: list[int]) -> int:
    return next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


class Tree(RuleBasedStateMachine):
    """The oracle is every list that was kept: with room for all, a hit is the longest prefix common with any."""

    @initialize(room=st.sampled_from([None, 20, 60]))
    def make(self, room: int | None) -> None:
        self.room = room
        self.budget = MemoryBudget(room)
        self.tree = Prefixes(self.budget)
        self.kept: dict[PrefixKey, list[list[int]]] = {}
        self.pinned: list[tuple[PrefixKey, list[int]]] = []

    @rule(key=KEYS, tokens=TOKENS)
    def insert(self, key: PrefixKey, tokens: list[int]) -> None:
        known = self.tree.num_cached(key, tokens)
        if self.tree.insert(key, tokens, Run(tuple(tokens[known:]))):
            self.kept.setdefault(key, []).append(tokens)
        else:
            assert known == len(tokens) or self.room is not None

    @rule(key=KEYS, tokens=TOKENS, most=st.integers(0, 12))
    def match(self, key: PrefixKey, tokens: list[int], most: int) -> None:
        hit = self.tree.match(key, tokens, most)
        held = [token for segment, count in hit.runs for token in segment.head(count).held]
        assert held == tokens[: hit.tokens] and hit.tokens <= most
        longest = max((common(one, tokens[:most]) for one in self.kept.get(key, [])), default=0)
        assert hit.tokens <= longest
        if self.room is None:
            assert hit.tokens == longest

    @precondition(lambda self: self.room is not None)
    @rule(key=KEYS, tokens=TOKENS)
    def pin(self, key: PrefixKey, tokens: list[int]) -> None:
        count = self.tree.pin(key, tokens)
        self.pinned.append((key, tokens[:count]))

    @precondition(lambda self: self.pinned)
    @rule(which=st.integers(0, 100))
    def unpin(self, which: int) -> None:
        self.tree.unpin(*self.pinned.pop(which % len(self.pinned)))

    @precondition(lambda self: self.room is not None)
    @rule(wanted=st.integers(0, 30))
    def shrink(self, wanted: int) -> None:
        before = self.tree.bytes
        freed = self.tree.shrink(wanted)
        assert before - self.tree.bytes == freed
        if not self.pinned:
            assert freed >= min(wanted, before)

    @invariant()
    def bytes_are_those_of_the_runs_and_never_too_many(self) -> None:
        if not hasattr(self, "tree"):
            return
        runs = list(self.tree.runs())
        assert self.tree.bytes == sum(segment.bytes for _, _, segment in runs) == self.budget.taken.get("prefixes", 0)
        assert len(runs) == len(self.tree)
        assert self.room is None or self.tree.bytes <= self.room
        for key, tokens, segment in runs:
            assert list(segment.held) == tokens[len(tokens) - segment.tokens :]
            assert self.tree.num_cached(key, tokens) == len(tokens)

    @invariant()
    def what_is_pinned_stays(self) -> None:
        for key, tokens in getattr(self, "pinned", ()):
            assert self.tree.num_cached(key, tokens) == len(tokens)


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_prefix_used_least_recently_goes_first() -> None:
    tree = Prefixes(MemoryBudget(40))
    for first in (1, 2):
        tree.insert(KEY, [first] * 10, Run((first,) * 10))
    tree.match(KEY, [1] * 10, 10)
    tree.insert(KEY, [3] * 5, Run((3,) * 5))
    assert [tree.num_cached(KEY, [first] * 10) for first in (1, 2, 3)] == [10, 0, 5]


def test_oversized_prefix_is_not_cached_and_drops_nothing() -> None:
    tree = Prefixes(MemoryBudget(40), max_bytes=30)
    tree.insert(KEY, [1] * 10, Run((1,) * 10))
    assert not tree.insert(KEY, [2] * 16, Run((2,) * 16))
    assert tree.num_cached(KEY, [1] * 10) == 10


PROMPTS = (
    "the cat sat on the mat",
    "the cat sat on the stop",
    "the cat",
    "the cat sat on the mat. the cat sat on the mat.",
)
DRAFTERS = {
    "alone": None,
    "drafted": Drafting(lambda prompt: ReplayDrafter([*prompt] * 9, wrong_every=3, wrong_token=7), 3),
}


def test_a_full_hit_still_feeds_the_last_token() -> None:
    with make_runtime(prefix_bytes=MANY) as runtime:
        prompt = runtime.encode(PROMPTS[0])
        runtime.complete(prompt, max_tokens=8)
        before = runtime.metrics()
        runtime.complete(prompt, max_tokens=8)
        after = runtime.metrics()
        assert after.cached_tokens - before.cached_tokens == len(prompt) - 1
        assert after.prefix_hits - before.prefix_hits == 1


def test_the_next_turn_of_a_conversation_finds_the_answer_before_it() -> None:
    with make_runtime(prefix_bytes=MANY) as runtime:
        prompt = runtime.encode("the cat sat")
        answer = runtime.complete(prompt, max_tokens=10, ignore_eos=True).tokens
        before = runtime.metrics().cached_tokens
        runtime.complete([*prompt, *answer, *runtime.encode("on the mat")], max_tokens=2)
        assert runtime.metrics().cached_tokens - before == len(prompt) + len(answer) - 1


LONG = [token % 40 + 3 for token in range(7, 7 * 131, 7)]  # 130 tokens


def fed_by(runtime: Runtime, prompt: list[int], **options: Any) -> int:
    """Tokens of the prompt that are computed."""
    before = runtime.metrics().cached_tokens
    runtime.complete(prompt, max_tokens=3, ignore_eos=True, **options)
    return len(prompt) - (runtime.metrics().cached_tokens - before)


def test_a_prompt_longer_than_the_window_is_kept() -> None:
    with make_runtime(window=24, sinks=2, prefix_bytes=MANY) as runtime:
        assert fed_by(runtime, LONG) == len(LONG)
        assert fed_by(runtime, LONG) == 1
        answer = list(runtime.complete(LONG, max_tokens=30, ignore_eos=True).tokens)
        assert fed_by(runtime, [*LONG, *answer, 5, 6, 7]) == 4, "the last token of an answer was not fed"
        assert fed_by(runtime, [*LONG[:100], *LONG]) <= len(LONG) + 24, "at most a window is read again"
        assert fed_by(runtime, [*LONG[:20], *LONG]) == len(LONG)
        assert fed_by(runtime, LONG[1:]) == len(LONG) - 1
        assert fed_by(runtime, LONG, tenant="another") == len(LONG)
        assert runtime.metrics().prefix_bytes > 0


def test_windows_of_other_sizes_and_engines_that_cannot_save_them_share_nothing() -> None:
    with make_runtime(window=24, sinks=2, prefix_bytes=MANY) as runtime:
        fed_by(runtime, LONG)
        assert fed_by(runtime, LONG, window=20) > len(LONG) - 24
    for engine in (FakeEngine(vocabulary=SIZE, can_save_evicted=False), FakeEngine(vocabulary=SIZE, max_rewind=0)):
        with make_runtime(engine, window=24, prefix_bytes=MANY) as runtime:
            fed_by(runtime, LONG)
            assert fed_by(runtime, LONG) == len(LONG) - 24, "the beginning alone, up to the first eviction"


def test_kept_windows_stay_within_the_budget_and_go_first_when_unused() -> None:
    engine = FakeEngine(vocabulary=SIZE)
    one = engine.state_bytes(KVCacheConfig(capacity_tokens=24, kv_bits=16))
    with make_runtime(engine, window=24, prefix_bytes=6 * one) as runtime:
        for first in range(12):
            fed_by(runtime, [first + 3, *LONG])
            assert runtime.metrics().prefix_bytes <= 6 * one
        assert fed_by(runtime, [11 + 3, *LONG]) == 1 and fed_by(runtime, [3, *LONG]) == len(LONG) + 1


@pytest.mark.parametrize("drafting", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "drawn"])
def test_answers_after_kept_windows_are_those_without(drafting: Drafting | None, options: dict[str, Any]) -> None:
    prompts = [LONG, [*LONG, 9, 9], LONG[:90], [*LONG[:90], *LONG[:60]], LONG]

    def answers(prefix_bytes: int) -> list[tuple[int, ...]]:
        with make_runtime(window=24, sinks=2, drafting=drafting, prefix_bytes=prefix_bytes) as runtime:
            return [
                tuple(runtime.complete(prompt, max_tokens=40, ignore_eos=True, **options).tokens) for prompt in prompts
            ]

    assert answers(MANY) == answers(0)


def test_simultaneous_requests_share_the_prefix_of_the_first() -> None:
    with make_runtime(prefix_bytes=MANY, sequences=2) as runtime:
        streams = [runtime.submit([5, 6, 7] * 12, max_tokens=4) for _ in range(6)]
        for stream in streams:
            stream.answer()
        assert runtime.metrics().prefix_hits >= 4


def test_prefixes_are_not_shared_between_tenants() -> None:
    with make_runtime(prefix_bytes=MANY) as runtime:
        for tenant, hits in (("a", 0), ("b", 0), ("a", 1), ("", 1)):
            runtime.generate(PROMPTS[0], max_tokens=2, tenant=tenant)
            assert runtime.metrics().prefix_hits == hits


def test_a_run_takes_about_what_is_counted_beside_its_keys_and_values() -> None:
    runs, key = 1000, PrefixKey("", None, 16)
    for texts in ([[run] * 4 for run in range(runs)], [[*range(run % 50), 5000 + run, 1] for run in range(runs)]):
        tree = Prefixes(MemoryBudget(), None, RUN_BYTES)
        tracemalloc.start()
        try:
            for text in texts:
                tree.insert(key, text, Length(len(text) - tree.num_cached(key, text)))
            measured = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        counted = tree.taken_bytes - tree.bytes
        assert len(tree) >= runs // 2 and 0.5 * counted < measured < 1.1 * counted


def test_states_displace_prefixes_within_the_budget() -> None:
    engine = FakeEngine(vocabulary=SIZE)
    one = engine.state_bytes(KVCacheConfig(capacity_tokens=64, kv_bits=16))
    most = 2 * one + 2 * RUN_BYTES + 200
    budget = MemoryBudget(most)
    with make_runtime(engine, context=64, budget=budget, prefix_bytes=MANY) as runtime:
        streams = [runtime.submit([token] * 30, max_tokens=20) for token in (1, 2, 3, 1, 2, 3)]
        while sum(runtime.metrics().finished.values()) < len(streams):
            runtime.step()
            for stream in streams:
                stream.poll()
            assert sum(budget.taken.values()) <= most
            assert runtime.metrics().running <= 2
        assert runtime.metrics().finished == {"length": 6}
        assert budget.taken["states"] == 0
        assert 0 < runtime.metrics().prefix_bytes < budget.taken["prefixes"], "places in the tree count too"


def test_a_state_that_can_never_fit_is_refused_with_the_numbers() -> None:
    with (
        make_runtime(budget=MemoryBudget(100)) as runtime,
        pytest.raises(DoesNotFit, match=r"needs .* and 100 B are free"),
    ):
        runtime.generate("the cat", max_tokens=2)


def test_pinned_prompt_is_not_dropped() -> None:
    engine = FakeEngine(vocabulary=SIZE)
    with make_runtime(engine, prefix_bytes=5000) as runtime:
        with runtime.pin([4] * 20) as count:
            assert count == 20
            for token in range(30):
                runtime.complete([token + 10] * 30, max_tokens=3)
            before = runtime.metrics().cached_tokens
            runtime.complete([*[4] * 20, 9], max_tokens=2)
            assert runtime.metrics().cached_tokens - before == 20
        for token in range(30):
            runtime.complete([token + 10] * 30, max_tokens=3)
        before = runtime.metrics().cached_tokens
        runtime.complete([*[4] * 20, 9], max_tokens=2)
        assert runtime.metrics().cached_tokens == before
    for room, error in ((500, InvalidInput), (0, Unsupported)):
        with make_runtime(prefix_bytes=room) as runtime, pytest.raises(error, match="kept"), runtime.pin([4] * 20):
            raise AssertionError("nothing was pinned")


def test_prefixes_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "prefixes"
    with make_runtime(prefix_bytes=MANY) as runtime:
        expected = [runtime.generate(text, max_tokens=9).tokens for text in PROMPTS]
        runtime.generate("the stop", max_tokens=3, tenant="other")
        written = runtime.save_prefixes(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with make_runtime(prefix_bytes=MANY) as runtime:
        assert runtime.load_prefixes(path) == written > 3
        assert [runtime.generate(text, max_tokens=9).tokens for text in PROMPTS] == expected
        assert runtime.metrics().prefix_hits == len(PROMPTS)
    with make_runtime(prefix_bytes=2000) as runtime:
        assert 0 < runtime.load_prefixes(path) < written
        assert runtime.metrics().prefix_bytes <= 2000


def test_damaged_prefix_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prefixes"
    with make_runtime(prefix_bytes=MANY) as runtime:
        runtime.generate(PROMPTS[0], max_tokens=9)
        runtime.save_prefixes(path)
        good = path.read_bytes()
        other = tmp_path / "link"
        other.symlink_to(path)
        flipped = good[:-7] + bytes([good[-7] ^ 1]) + good[-6:]
        cases = {"": InvalidInput, "edgekit": InvalidInput}
        for place in range(0, len(good), 97):
            cases[good[:place].decode("latin-1")] = EdgekitError
        cases[flipped.decode("latin-1")] = DamagedArtifact
        cases[(good + b"x").decode("latin-1")] = DamagedArtifact
        cases[good.replace(b'"tokens": [', b'"tokens": [-1, ').decode("latin-1")] = EdgekitError
        for data, kind in cases.items():
            path.write_bytes(data.encode("latin-1"))
            before = runtime.metrics().prefix_bytes
            with pytest.raises(kind):
                runtime.load_prefixes(path)
            assert runtime.metrics().prefix_bytes == before
        path.write_bytes(good)
        with pytest.raises(InvalidInput, match="link is not followed"):
            runtime.load_prefixes(other)
        path.chmod(0o666)
        with pytest.raises(InvalidInput, match="nobody else may write"):
            runtime.load_prefixes(path)
        with pytest.raises(InvalidInput, match="cannot be opened"):
            runtime.load_prefixes(tmp_path / "missing")


def test_prefixes_of_another_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prefixes"
    with make_runtime(prefix_bytes=MANY) as runtime:
        runtime.generate(PROMPTS[0], max_tokens=9)
        runtime.save_prefixes(path)
    with make_runtime(FakeEngine(vocabulary=codec().vocabulary, layers=3), prefix_bytes=MANY) as runtime:
        with pytest.raises(InvalidInput, match="was saved by another model"):
            runtime.load_prefixes(path)
        monkeypatch.setattr(type(runtime), "_identity", "0" * 64)
        with pytest.raises(InvalidInput, match="was saved by another artifact"):
            runtime.load_prefixes(path)
        assert runtime.metrics().prefix_bytes == 0
