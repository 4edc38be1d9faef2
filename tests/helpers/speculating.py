"""Every drafter, over fake engines, for tests that no drafter changes a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from runtimes import codec

from edgekit.contracts.engine import Engine
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.methods.drafters.early_exit import EarlyExit
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.speculation.controller import DrafterFactory, SpeculationController
from edgekit.runtime.speculation.costs import Costs
from edgekit.runtime.speculation.draft_model import DraftModel
from edgekit.runtime.speculation.ngram import Corpus, Ngrams
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


def _ngrams(corpus: Sequence[int] | None = None) -> Ngrams:
    return Ngrams(Corpus(corpus) if corpus else None, tokens=6)


def _adapting(*kinds) -> Speculation:
    return Speculation(kinds, SpeculationController(COSTS))


SOURCES: dict[str, MakeSource] = {
    "prompt lookup": lambda target, draft, storage, text: FixedLengthDrafting(_ngrams()),
    "prompt lookup with a corpus": lambda target, draft, storage, text: FixedLengthDrafting(_ngrams(text)),
    "a draft model": lambda target, draft, storage, text: FixedLengthDrafting(
        draft_model(draft, storage, target.capabilities.vocabulary)
    ),
    "early exit": lambda target, draft, storage, text: FixedLengthDrafting(
        EarlyExit(target, target.capabilities.exits[0], FREE)
    ),
    "playback, often wrong": lambda target, draft, storage, text: Drafting(
        lambda prompt: ReplayDrafter([*prompt, *text], wrong_every=3), 5
    ),
    "adapting prompt lookup": lambda target, draft, storage, text: _adapting(_ngrams()),
    "adapting draft model": lambda target, draft, storage, text: _adapting(
        draft_model(draft, storage, target.capabilities.vocabulary)
    ),
    "auto": lambda target, draft, storage, text: _adapting(
        _ngrams(),
        EarlyExit(target, target.capabilities.exits[0], FREE),
        draft_model(draft, storage, target.capabilities.vocabulary),
    ),
}


def check_many_drafted_prompts(open_engine: Callable[[], Engine], count: int = 500) -> None:
    """The texts of random prompts are the same with drafts of which a third is wrong.

    The engine is exact and has the vocabulary of `codec()`.
    """
    random, size = Random(7), codec().vocabulary
    prompts = [[random.randrange(size) for _ in range(random.randint(3, 24))] for _ in range(count)]
    storage = KVCacheConfig(capacity_tokens=48, kv_bits=32)

    def texts(drafting: Drafting | None) -> tuple[list[tuple[int, ...]], int]:
        with Runtime(
            open_engine(),
            codec(),
            kv_config=storage,
            policy=KVEvictionPolicy(),
            sequences=1,
            chunk_tokens=16,
            drafting=drafting,
        ) as runtime:
            found = [tuple(runtime.complete(prompt, max_tokens=16).tokens) for prompt in prompts]
            return found, runtime.metrics().proposed

    plain, none = texts(None)
    known = {tuple(prompt): [*prompt, *text] for prompt, text in zip(prompts, plain, strict=True)}
    drafted, proposed = texts(Drafting(lambda prompt: ReplayDrafter(known[tuple(prompt)], wrong_every=3), 5))
    assert drafted == plain
    assert none == 0 and proposed > count


def check_drafts_change_no_text(open_engine: Callable[[], Engine]) -> None:
    """Proposals that are often right and often wrong, and those of a text that repeats itself, change no text.

    The engine is exact and has the vocabulary of `codec()`.
    """
    size = codec().vocabulary
    few = {"logit_bias": dict.fromkeys(range(40, 46), 100.0)}
    asked = [{}, few, few | {"temperature": 2.0, "seed": 3}]
    prompts = [[(7 * place + 3 * step) % size for step in range(4 + place)] for place in (0, 2, 3, 5)]

    def answers(drafter: str | None, text: list[int], window: int | None) -> tuple[list[tuple[int, ...]], int, int]:
        engine = open_engine()
        storage = KVCacheConfig(capacity_tokens=window or 96, kv_bits=32)
        source = SOURCES[drafter](engine, engine, storage, text) if drafter else None
        policy = KVEvictionPolicy.of(window, 3) if window else KVEvictionPolicy()
        with Runtime(
            engine, codec(), kv_config=storage, policy=policy, sequences=1, chunk_tokens=16, drafting=source
        ) as runtime:
            found = [runtime.complete(prompt, max_tokens=40, **each).tokens for prompt in prompts for each in asked]
            metrics = runtime.metrics()
            return [tuple(tokens) for tokens in found], metrics.proposed, metrics.accepted

    for window in (None, 24):
        plain, _, _ = answers(None, [], window)
        for drafter in ("prompt lookup", "playback, often wrong"):
            found, proposed, accepted = answers(drafter, list(plain[1]), window)
            assert found == plain, (drafter, window)
            assert proposed > accepted > 0, (drafter, window)
