"""No drafter changes a text, with any sampling, penalty, format, window or batch."""

from __future__ import annotations

from typing import Any

import pytest
from runtimes import codec, make_runtime
from speculating import FEW, KEPT, SOURCES, draft_model

from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.errors import TargetFailed
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.speculation.controller import DrafterFactory
from edgekit.testing import FakeEngine
from edgekit.testing.drafting import Drafting, FixedLengthDrafting

SIZE = codec().vocabulary
EOS = frozenset({2})

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "few tokens, greedy": {"logit_bias": FEW},
    "few tokens": {"logit_bias": FEW, "temperature": 5.0, "seed": 2},
    "sampled": {"temperature": 1.0, "seed": 4},
    "top-k and top-p": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5},
    "min-p": {"temperature": 2.0, "min_p": 0.05, "seed": 8},
    "typical": {"temperature": 1.0, "typical_p": 0.7, "seed": 9},
    "every penalty": {
        "temperature": 0.7,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.2,
        "seed": 6,
    },
    "a regular expression": {"regex": r"([a-c]{2} ){8}", "temperature": 1.0, "seed": 7},
}
PROMPTS = ([5, 6, 7] * 9, [50, 51, 52, 53], list(range(60, 90)))


def target() -> FakeEngine:
    return FakeEngine(vocabulary=SIZE, layers=3, max_states=4)


def opened(name: str | None, kept: dict[str, Any], text: list[int] = (), *, draft_seed: int = 0) -> Runtime:  # type: ignore[assignment]
    engine = target()
    source: DrafterFactory | None = None
    if name is not None:
        # The draft's vocabulary is padded further than the target's; two states for three requests.
        draft = FakeEngine(vocabulary=SIZE + 9, layers=3, seed=draft_seed, max_states=2)
        source = SOURCES[name](engine, draft, KVCacheConfig(capacity_tokens=256, kv_bits=16), text)
    return make_runtime(engine, eos=EOS, chunk_tokens=10, sequences=3, drafting=source, **kept)


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, str], list[tuple[Any, ...]]]:
    """The answers without a draft, one request at a time."""
    found = {}
    for kept, options in KEPT.items():
        with opened(None, options) as runtime:
            for name, sampling in SAMPLINGS.items():
                answers = [runtime.complete(prompt, max_tokens=40, **sampling) for prompt in PROMPTS]
                found[kept, name] = [(answer.tokens, answer.text, answer.finish_reason) for answer in answers]
    return found


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("drafter", SOURCES)
def test_no_drafter_changes_a_text(plain: Any, drafter: str, kept: str) -> None:
    proposed = 0
    for name, sampling in SAMPLINGS.items():
        text = list(plain[kept, name][0][0])
        with opened(drafter, KEPT[kept], text) as runtime:
            streams = [runtime.submit(prompt, max_tokens=40, **sampling) for prompt in PROMPTS]
            found = [(answer.tokens, answer.text, answer.finish_reason) for answer in map(_answer, streams)]
            assert found == plain[kept, name], (drafter, kept, name)
            assert runtime.engine.states == []
            proposed += runtime.metrics().proposed
    assert proposed > 0 or drafter.startswith("adapting") or kept == "a tiny window"


def _answer(stream: Any) -> Any:
    return stream.answer()


@pytest.mark.parametrize("name", ["greedy", "sampled", "top-k and top-p", "every penalty", "a regular expression"])
@pytest.mark.parametrize("kept", ["everything", "a window with sinks"])
def test_identical_draft_is_always_accepted(plain: Any, kept: str, name: str) -> None:
    """The draft has the same noise, penalties, masks and evictions: only tokens beyond the end are not accepted."""
    engine = target()
    twin = draft_model(target(), KVCacheConfig(capacity_tokens=256, kv_bits=16), SIZE)
    with make_runtime(engine, eos=EOS, chunk_tokens=10, drafting=FixedLengthDrafting(twin), **KEPT[kept]) as runtime:
        answer = runtime.complete(PROMPTS[2], max_tokens=40, **SAMPLINGS[name])
        assert answer.tokens == plain[kept, name][2][0]
        timings = answer.timings
        assert timings.accepted >= timings.proposed - 5 and timings.accepted > 5


def test_draft_model_catches_up_and_rewinds_wrong_tokens() -> None:
    class Recording(FakeEngine):
        fed = 0

        def forward(self, chunks):
            self.fed += sum(len(chunk.tokens) for chunk in chunks)
            return super().forward(chunks)

    engine = Recording(vocabulary=SIZE, layers=3, seed=5)
    model = draft_model(engine, KVCacheConfig(capacity_tokens=256, kv_bits=16), SIZE, tokens=3)
    with make_runtime(target(), drafting=FixedLengthDrafting(model)) as runtime:
        answer = runtime.complete([1] * 20, max_tokens=30)
        # Every token once, and at most the two guesses of each step that were wrong.
        assert engine.fed <= 20 + 30 + 2 * 30
        assert len(answer.tokens) == 30
    assert engine.closed and engine.states == []


def test_a_draft_without_a_free_state_proposes_nothing() -> None:
    model = draft_model(FakeEngine(vocabulary=SIZE, max_states=1), KVCacheConfig(capacity_tokens=256, kv_bits=16), SIZE)
    with make_runtime(drafting=FixedLengthDrafting(model)) as runtime:
        streams = [runtime.submit("the cat", max_tokens=20) for _ in range(3)]
        answers = [stream.answer() for stream in streams]
        assert answers[0].timings.proposed > 0 and len({answer.tokens for answer in answers}) == 1
        assert runtime.generate("the cat", max_tokens=20).timings.proposed > 0
        assert model.num_states == 0


def test_a_draft_engine_that_fails_ends_its_own_request_alone() -> None:
    engine = FakeEngine(vocabulary=SIZE)
    engine.failures = {3}
    model = draft_model(engine, KVCacheConfig(capacity_tokens=256, kv_bits=16), SIZE)
    with make_runtime(drafting=FixedLengthDrafting(model)) as runtime:
        first = runtime.submit("the cat", max_tokens=20)
        with pytest.raises(TargetFailed):
            first.answer()
        assert len(runtime.generate("the", max_tokens=10).tokens) == 10
        assert model.num_states == 0 and runtime.engine.states == []


class Broken:
    """A caller's own drafter, one of whose methods raises at its second call."""

    def __init__(self, method: str) -> None:
        self._method, self._left = method, 1

    def _call(self, method: str) -> None:
        if method == self._method:
            self._left -= 1
            if self._left < 0 or method == "close":
                raise ZeroDivisionError(f"{method} is broken")

    def propose(self, history: Any, limit: int) -> tuple[int, ...]:
        self._call("propose")
        return (history[-1],)[:limit]

    def observe(self, accepted: Any) -> None:
        self._call("observe")

    def close(self) -> None:
        self._call("close")


@pytest.mark.parametrize("method", ["propose", "observe", "close"])
def test_a_drafter_that_raises_ends_its_own_request_alone(method: str) -> None:
    drafters = iter([Broken(method)])
    drafting = Drafting(lambda prompt: next(drafters, Broken("none")))
    with make_runtime(drafting=drafting, sequences=2) as runtime:
        expected = runtime.generate("the", max_tokens=10, drafting=False).tokens
        broken, whole = runtime.submit("the cat", max_tokens=20), runtime.submit("the", max_tokens=10)
        if method == "close":  # its text is complete by then
            assert len(broken.answer().tokens) == 20
        else:
            with pytest.raises(ZeroDivisionError, match=f"{method} is broken"):
                broken.answer()
        assert whole.answer().tokens == expected
        assert runtime.generate("the", max_tokens=10).tokens == expected
        assert runtime.engine.states == []


def test_cancelling_releases_the_draft_too() -> None:
    model = draft_model(FakeEngine(vocabulary=SIZE), KVCacheConfig(capacity_tokens=256, kv_bits=16), SIZE)
    with make_runtime(drafting=FixedLengthDrafting(model)) as runtime:
        stream = runtime.stream("the cat", max_tokens=100)
        for _ in range(5):
            next(stream)
        assert model.num_states == 1
        stream.close()
        assert model.num_states == 0


def test_report_counts_proposed_and_accepted_tokens() -> None:
    engine = target()
    source = SOURCES["adapting draft model"](engine, target(), KVCacheConfig(capacity_tokens=256, kv_bits=16), [])
    with make_runtime(engine, drafting=source) as runtime:
        assert runtime.speculation().reason == "nothing was proposed yet"
        runtime.complete([1, 2, 3], max_tokens=60)
        report = runtime.speculation()
    (model,) = report.proposals
    assert model.name == "model" and model.accepted == model.proposed > 0
    assert set(model.acceptance) == {1.0}
    assert report.tokens_per_step > 1 and report.drafted_steps <= report.steps
    assert report.verify_cost[1] == 1.0
    with make_runtime() as runtime:
        assert runtime.speculation() is None
