"""Models with a recurrent part, or layers that share a cache, on every target: drafts, batches, states, prefixes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import family_models as models
from engines import Model, make_model, row, spaced
from runtimes import codec
from speculating import SOURCES

from edgekit.contracts import recurrent
from edgekit.contracts.engine import Chunk, Engine
from edgekit.contracts.feeding import feed
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.runtime.memory.budget import MemoryBudget
from edgekit.runtime.prefix_cache.tree import Prefixes, PrefixKey, Reuse
from edgekit.runtime.runtime import Runtime
from edgekit.testing import ReplayDrafter
from edgekit.testing.drafting import Drafting

TOKENS = [int(token) for token in models.tokens_of(90, seed=3)]
HYBRIDS = [("onnx", "lfm2"), ("onnx", "qwen3_5"), ("mlx", "lfm2"), ("mlx", "lfm2_moe"), ("mlx", "qwen3_5")]
EVERY = [*HYBRIDS, ("onnx", "gemma4")]  # whose layers share keys and values
DIES_AFTER_SAVING = """
import os, pathlib, signal, sys
from edgekit.contracts import recurrent
recurrent.LEAST_TOKENS = int(sys.argv[1])
from edgekit.contracts.feeding import feed
from edgekit.contracts.plan import Plan
from edgekit.plugins import load_target
plan = Plan.model_validate_json(pathlib.Path(sys.argv[2]).read_text())
engine = load_target(plan.target).open(plan, pathlib.Path(sys.argv[3]), exact=True)
state = engine.start(plan.storage)
feed(engine, state, [int(token) for token in sys.argv[5].split()], 0)
state.save(0, state.length).write(pathlib.Path(sys.argv[4]))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def close_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    spaced(monkeypatch, 4)


def made(target: str, family: str, recipe: str = "s4-g64", **options: Any) -> Model:
    fast = {"level": 4} if target == "onnx" else {}
    return make_model(target, family, recipe, chunk_tokens=16, sequences=8, **fast, **options)


def of_text(family: str) -> dict[str, int]:
    """Changes of a config, so that a model has the tokens of `codec()`."""
    tables = [name for name in models.EVERY[family][1] if name.startswith("vocab_size")]
    return dict.fromkeys(tables, codec().vocabulary)


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
    """Proposals change no text: not when often right and often wrong, and not in a text that repeats itself.

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


@pytest.mark.parametrize(("target", "family"), [row(*each) for each in EVERY if each not in HYBRIDS[3:]])
def test_drafts_change_no_text_in_exact_mode(target: str, family: str) -> None:
    check_drafts_change_no_text(partial(made(target, family, "s4-g32", config=of_text(family)).open, exact=True))


@pytest.mark.slow
@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize(("target", "family"), [row(*each) for each in HYBRIDS if each != ("mlx", "lfm2")])
def test_drafted_prompts_have_the_plain_texts(target: str, family: str, count: int) -> None:
    model = made(target, family, "s4-g32", config=of_text(family))
    check_many_drafted_prompts(partial(model.open, exact=True), count)


@pytest.mark.parametrize(
    ("target", "family", "tolerance"),
    [*(row(*each, 0.0) for each in EVERY), *(row("onnx", family, 0.05) for family in ("lfm2", "qwen3_5"))],
)
def test_eight_in_a_batch_equal_eight_alone(target: str, family: str, tolerance: float) -> None:
    """Also after states between them were freed, whose places others take."""
    engine = made(target, family).open(exact=tolerance == 0)
    prompts = [TOKENS[place : place + 5 + place] for place in range(8)]

    def start(prompt: list[int]) -> Any:
        state = engine.start(engine.plan.storage)
        feed(engine, state, prompt)
        return state

    alone = []
    for prompt in prompts:
        state = start(prompt)
        alone.append([engine.forward([Chunk(state, [token], 1)])[0] for token in TOKENS[40:50]])
        state.close()
    states = [start(prompt) for prompt in prompts]
    for place, token in enumerate(TOKENS[40:50]):
        found = engine.forward([Chunk(state, [token], 1) for state in states])
        for index, rows in enumerate(found):
            expected = alone[index][place]
            assert np.abs(rows - expected).max() <= tolerance * np.abs(expected).max(), (place, index)
        if place in (3, 6):
            states.pop(1).close()
            alone.pop(1)
    engine.close()


@pytest.mark.parametrize(("target", "family"), [row(*each) for each in EVERY])
def test_a_killed_state_continues_equally_in_another_process(target: str, family: str, tmp_path: Path) -> None:
    model = made(target, family)
    engine, saved, plan = model.open(exact=True), tmp_path / "saved", tmp_path / "plan.json"
    state = engine.start(engine.plan.storage)
    feed(engine, state, TOKENS[:30])
    expected = feed(engine, state, TOKENS[30:40], 10)
    state.close()
    plan.write_text(model.plan.to_json())
    arguments = [str(recurrent.LEAST_TOKENS), str(plan), str(model.files), str(saved), " ".join(map(str, TOKENS[:30]))]
    killed = subprocess.run(
        [sys.executable, "-c", DIES_AFTER_SAVING, *arguments], capture_output=True, text=True, check=False
    )
    assert killed.returncode == -9, killed.stderr
    again = engine.start(engine.plan.storage)
    again.restore(engine.read_segment(saved))
    assert again.num_replayed == 0
    np.testing.assert_array_equal(feed(engine, again, TOKENS[30:40], 10), expected)
    engine.close()


@pytest.mark.parametrize(("target", "family"), [row(*each) for each in EVERY])
def test_a_prefix_hit_computes_the_suffix_and_at_most_one_gap(
    target: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(target, family)
    gap = recurrent.checkpoint_tokens(model.plan.model) or 1
    assert gap < 10
    engine = model.open(exact=True)
    reuse = Reuse(Prefixes(MemoryBudget(None)), PrefixKey("", None, 32))
    first = engine.start(engine.plan.storage)
    feed(engine, first, TOKENS[:50])
    reuse.keep(first, TOKENS[:50])
    first.close()
    computed: list[int] = []
    forward = engine._forward
    monkeypatch.setattr(
        engine,
        "_forward",
        lambda states, chunks: computed.extend(len(chunk.tokens) for chunk in chunks) or forward(states, chunks),
    )
    for shared in (50, 49, 33, 32, 7):
        prompt = [*TOKENS[:shared], *TOKENS[60:75]]
        state = engine.start(engine.plan.storage)
        assert reuse.restore(state, prompt, len(prompt) - 1) == shared
        computed.clear()
        found = feed(engine, state, prompt[shared:], 3)
        assert 15 <= sum(computed) < 15 + gap, (shared, computed)
        plain = engine.start(engine.plan.storage)
        np.testing.assert_array_equal(found, feed(engine, plain, prompt, 3), str(shared))
        reuse.keep(state, prompt)
        state.close()
        plain.close()
    engine.close()
