"""States with a recurrent part through the scheduler: drafts, windows, batches and prefixes change no text."""

from __future__ import annotations

from typing import Any

import pytest
from runtimes import codec, make_runtime
from speculating import FEW, KEPT, SOURCES

from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.errors import Unsupported
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.speculation.controller import Acceptance, DraftStats, SpeculationController
from edgekit.runtime.speculation.costs import CostProbe, Costs
from edgekit.runtime.speculation.draft_model import draft_kv_config
from edgekit.runtime.speculation.ngram import Ngrams
from edgekit.testing import FakeEngine

SIZE = codec().vocabulary
SPACING = 8
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"logit_bias": FEW},
    "sampled": {"logit_bias": FEW, "temperature": 5.0, "seed": 2},
}
PROMPTS = [[5, 6, 7] * 9, [50, 51, 52, 53], list(range(60, 90)), [7], [40, 41] * 12, [9, 8], [44] * 20, list(range(9))]


def engine(**options: Any) -> FakeEngine:
    return FakeEngine(vocabulary=SIZE, max_states=8, **{"checkpoint_tokens": SPACING, **options})


def opened(**options: Any) -> Runtime:
    return make_runtime(options.pop("engine", None) or engine(), chunk_tokens=10, **options)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("drafter", ["prompt lookup", "adapting prompt lookup", "playback, often wrong"])
def test_drafts_and_batches_of_eight_change_no_text(drafter: str, kept: str) -> None:
    for sampling in SAMPLINGS.values():
        with opened(sequences=1, **KEPT[kept]) as runtime:
            plain = [tuple(runtime.complete(prompt, max_tokens=40, **sampling).tokens) for prompt in PROMPTS]
        for alone in (False, True):
            drafting = engine()
            source = SOURCES[drafter](drafting, drafting, KVCacheConfig(capacity_tokens=256, kv_bits=16), plain[0])
            with opened(engine=drafting, sequences=1 if alone else 8, drafting=source, **KEPT[kept]) as runtime:
                streams = [runtime.submit(prompt, max_tokens=40, **sampling) for prompt in PROMPTS]
                assert [tuple(stream.answer().tokens) for stream in streams] == plain
                assert drafting.states == []
                assert runtime.metrics().proposed > 0 or drafter.startswith("adapting") or kept == "a tiny window"


@pytest.mark.parametrize("shared", [5, 8, 27, 40])
def test_a_prefix_hit_reads_the_suffix_and_at_most_one_gap(shared: int) -> None:
    text, others = list(range(60, 100)), [10, 11, 12, 13]
    prompt = [*text[:shared], *others]
    with opened(sequences=1, context=256) as runtime:
        expected = runtime.complete(prompt, max_tokens=12)
    with opened(sequences=1, context=256, prefix_bytes=1 << 20) as runtime:
        runtime.complete(text, max_tokens=12)
        found = runtime.complete(prompt, max_tokens=12)
        again = runtime.complete([*prompt, *found.tokens, 9], max_tokens=2)
    assert found.tokens == expected.tokens
    assert shared - SPACING < found.timings.cached_tokens <= shared
    assert again.timings.cached_tokens > len(prompt) + len(found.tokens) - 1 - SPACING


def test_a_draft_with_a_recurrent_part_is_refused_by_name() -> None:
    storage = KVCacheConfig(capacity_tokens=64, kv_bits=16)
    with pytest.raises(Unsupported, match=r"draft here: it has a recurrent part.*up to 8 tokens"):
        draft_kv_config(engine(), storage, KVEvictionPolicy(), "here")


def test_draft_cost_includes_replays() -> None:
    """Each accepted token is computed once more, so a draft that pays without a recurrent part may not with one."""

    costs = Costs({1: 1.0, 2: 1.6, 4: 2.4, 8: 4.0, 16: 7.2})
    sure = Acceptance()
    for _ in range(200):
        sure.add(1.0)
    speeds = []
    for replays in (False, True):
        controller = SpeculationController(costs, replays=replays)
        controller.begin(1)
        speeds.append(controller.choose(DraftStats(Ngrams(), controller.times), sure, 3).speed_up)
    assert speeds[0] > 1.3 * speeds[1]


def test_measuring_costs_leaves_nothing_to_compute_again() -> None:
    target = engine(checkpoint_tokens=64)
    probe = CostProbe(target, KVCacheConfig(capacity_tokens=128, kv_bits=16))
    for tokens in probe.sizes:
        probe.seconds(tokens)
        probe.seconds(tokens)
        forwards = target.forwards
        assert probe.state.num_replayed == 0, tokens
        assert target.forwards == forwards
    probe.close()
