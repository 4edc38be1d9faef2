"""Windows in the runtime, compared with a plain list of the kept tokens; the cache never exceeds the window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engines import make_model, row
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)  # fmt: skip
from runtimes import make_runtime

from edgekit.contracts.engine import Chunk, Engine
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.testing import FakeEngine

VOCABULARY = 160
ONE_LAYER: dict[str, Any] = {"vocabulary": VOCABULARY, "layers": 1}


class Evictions(RuleBasedStateMachine):
    """Feed, rewind and evict tokens under a policy; the model is the list of tokens that should be cached.

    With one layer, a key depends only on its token and place, so a fresh state fed that list must give the same logits.
    """

    engine: Engine
    kv_bits = 16
    tolerance = 0.0

    @initialize(window=st.integers(16, 40), sinks=st.integers(0, 5), data=st.data())
    def begin(self, window: int, sinks: int, data: st.DataObject) -> None:
        keep = data.draw(st.sampled_from(["newest", *self.engine.capabilities.scorers]))
        window += 24 if keep != "newest" else 0  # room for spans to choose from
        self.policy = KVEvictionPolicy.of(window, sinks, keep)
        self.storage = KVCacheConfig(capacity_tokens=window, kv_bits=self.kv_bits)
        self.state = self.engine.start(self.storage)
        self.kept: list[int] = []
        self.text: list[int] = []
        self.fed = 0

    @rule(tokens=st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=12))
    def feed(self, tokens: list[int]) -> None:
        """Feed like the scheduler: evict when the window is full, and never feed past its end."""
        while tokens:
            eviction = self.policy.eviction(len(self.kept))
            spans = [eviction] if eviction else []
            if eviction and self.policy.is_scored:
                newest = self.kept[-self.policy.block :]
                spans = self.policy.least(self.state.scores(self.policy.keep, self.policy.sinks, newest).tolist())
            assert self.policy.make_room(self.state, self.text) == bool(spans)
            for start, stop in reversed(spans):
                assert (
                    self.policy.sinks <= start < stop <= len(self.kept) - self.policy.protected * self.policy.is_scored
                )
                del self.kept[start:stop]
            room = self.policy.remaining_capacity(len(self.kept))
            assert room
            now, tokens = tokens[:room], tokens[room:]
            self.engine.forward([Chunk(self.state, now, 0)])
            self.kept += now
            self.text += now
            self.fed += len(now)

    @precondition(lambda self: len(self.kept) > 4)
    @rule(count=st.integers(1, 4))
    def rewind(self, count: int) -> None:
        self.state.rewind(count)
        del self.kept[-count:], self.text[-count:]
        self.fed -= count

    @precondition(lambda self: 0 < len(self.kept) < self.storage.capacity_tokens)
    @rule(token=st.integers(3, VOCABULARY - 1))
    def says_what_the_list_says(self, token: int) -> None:
        found = self.engine.forward([Chunk(self.state, [token], 1)])[0].copy()
        self.state.rewind(1)
        fresh = self.engine.start(self.storage)
        expected = self.engine.forward([Chunk(fresh, [*self.kept, token], 1)])[0]
        fresh.close()
        if self.tolerance:
            scale = float(np.abs(expected).max())
            assert float(np.abs(found - expected).max()) <= self.tolerance * scale
        else:
            np.testing.assert_array_equal(found, expected)

    @invariant()
    def holds_what_the_list_holds(self) -> None:
        if hasattr(self, "state"):
            assert self.state.length == len(self.kept) <= self.storage.capacity_tokens
            assert self.state.position == self.fed

    def teardown(self) -> None:
        if hasattr(self, "state"):
            self.state.close()


class OnTheFake(Evictions):
    engine = FakeEngine(**ONE_LAYER)


TestEvictionsOnTheFake = OnTheFake.TestCase
TestEvictionsOnTheFake.settings = settings(deadline=None, max_examples=40, stateful_step_count=20)


@pytest.mark.parametrize(
    ("target", "recipe", "one_layer"),
    [
        row("onnx", "s4-g32", {"config": {"num_hidden_layers": 1}}),
        row("mlx", "s4-g32", {"config": {"num_hidden_layers": 1}}),
        row("executorch", "float32", {"layers": 1}),
    ],
)
def test_evictions_keep_what_the_list_keeps(target: str, recipe: str, one_layer: dict[str, Any]) -> None:
    class OnATarget(Evictions):
        engine = make_model(target, "llama", recipe, context=64, chunk_tokens=64, **one_layer).open()
        kv_bits = 32
        tolerance = 2e-5

    run_state_machine_as_test(OnATarget, settings=settings(deadline=None, max_examples=20, stateful_step_count=15))
    OnATarget.engine.close()


@pytest.mark.parametrize("sinks", [0, 3])
def test_endless_text_stays_within_its_window(sinks: int) -> None:
    with make_runtime(window=32, sinks=sinks) as runtime:
        stream = runtime.stream([5, 6, 7], max_tokens=700, ignore_eos=True)
        held = []
        for _ in stream:
            metrics = runtime.metrics()
            held.append((metrics.kv_tokens, metrics.states_bytes))
        assert max(tokens for tokens, _ in held) <= 32
        assert len({size for _, size in held if size}) == 1
        assert runtime.metrics().evictions > 100
        assert len(runtime.complete([1] * 100).tokens) == 32  # no limit given: as much as the window holds
