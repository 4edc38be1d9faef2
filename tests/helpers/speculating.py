"""Every drafter, over fake engines, for tests that no drafter changes a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from edgekit.contracts.engine import Engine
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.methods.drafters.early_exit import EarlyExit
from edgekit.runtime.speculation.controller import DrafterFactory, SpeculationController
from edgekit.runtime.speculation.costs import Costs
from edgekit.runtime.speculation.draft_model import DraftModel
from edgekit.runtime.speculation.ngram import Ngrams
from edgekit.runtime.speculation.speculation import Speculation
from edgekit.testing.drafting import Drafting, FixedLengthDrafting, ReplayDrafter

COSTS = Costs({1: 1.0, 2: 1.02, 4: 1.05, 8: 1.1, 16: 1.3})
FREE = 1e-4  # of a step: drafting this cheap always pays, so that the adapting ones draft as well

MakeSource = Callable[[Engine, Engine, KVCacheConfig, Sequence[int]], DrafterFactory]
"""From the target's engine, a draft's engine, how states are held, and a text that comes true or not."""

FEW = dict.fromkeys(range(40, 46), 100.0)  # so few tokens that runs repeat
KEPT: dict[str, dict[str, Any]] = {
    "everything": {"context": 256},
    "a window with sinks": {"window": 24, "sinks": 3},
    "a tiny window": {"window": 6, "sinks": 1},
}


def draft_model(engine: Engine, storage: KVCacheConfig, vocabulary: int, tokens: int = 5) -> DraftModel:
    return DraftModel(engine, storage, COSTS.scaled(FREE), vocabulary=vocabulary, chunk_tokens=7, tokens=tokens)


def _adapting(*kinds) -> Speculation:
    return Speculation(kinds, SpeculationController(COSTS))


SOURCES: dict[str, MakeSource] = {
    "prompt lookup": lambda target, draft, storage, text: FixedLengthDrafting(Ngrams(tokens=6)),
    "a draft model": lambda target, draft, storage, text: FixedLengthDrafting(
        draft_model(draft, storage, target.capabilities.vocabulary)
    ),
    "early exit": lambda target, draft, storage, text: FixedLengthDrafting(
        EarlyExit(target, target.capabilities.exits[0], FREE)
    ),
    "playback, often wrong": lambda target, draft, storage, text: Drafting(
        lambda prompt: ReplayDrafter([*prompt, *text], wrong_every=3), 5
    ),
    "adapting prompt lookup": lambda target, draft, storage, text: _adapting(Ngrams(tokens=6)),
    "adapting draft model": lambda target, draft, storage, text: _adapting(
        draft_model(draft, storage, target.capabilities.vocabulary)
    ),
    "auto": lambda target, draft, storage, text: _adapting(
        Ngrams(tokens=6),
        EarlyExit(target, target.capabilities.exits[0], FREE),
        draft_model(draft, storage, target.capabilities.vocabulary),
    ),
}
