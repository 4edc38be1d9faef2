"""What drafting costs and refuses for states with a recurrent part."""

from __future__ import annotations

from typing import Any

import pytest
from runtimes import codec

from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.errors import Unsupported
from edgekit.runtime.speculation.controller import Acceptance, DraftStats, SpeculationController
from edgekit.runtime.speculation.costs import CostProbe, Costs
from edgekit.runtime.speculation.draft_model import draft_kv_config
from edgekit.runtime.speculation.ngram import Ngrams
from edgekit.testing import FakeEngine

SIZE = codec().vocabulary
SPACING = 8


def engine(**options: Any) -> FakeEngine:
    return FakeEngine(vocabulary=SIZE, max_states=8, **{"checkpoint_tokens": SPACING, **options})


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
