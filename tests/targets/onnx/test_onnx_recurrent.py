"""Models with a recurrent part (LFM2, Qwen3.5) on onnxruntime: the suite, texts, drafts, batches, states, prefixes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import family_models as models
from edgekit_onnx import runner
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import EXACT, FAST, export
from runtimes import codec
from speculating import SOURCES

from edgekit.contracts import recurrent
from edgekit.contracts.engine import Chunk
from edgekit.contracts.feeding import feed
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.contracts.plan import Plan
from edgekit.enginekit import recurrent as parts
from edgekit.errors import DamagedArtifact, Unsupported
from edgekit.runtime.memory.budget import MemoryBudget
from edgekit.runtime.prefix_cache.tree import Prefixes, PrefixKey, Reuse
from edgekit.runtime.runtime import Runtime
from edgekit.testing import check_engine

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]

SPACING = 4
TOKENS = [int(token) for token in models.tokens_of(90, seed=3)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test its own facts of the machine, and checkpoints that lie close."""
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(recurrent, "LEAST_TOKENS", SPACING)


class Made:
    """The exported files of a tiny model, which tests open."""

    def __init__(
        self, folder: Path, family: str, recipe: str, level: int, *, vocab_size: int | None = None, **plan: Any
    ) -> None:
        self.folder = folder
        kind, config = models.RECURRENT[family]
        models.write_model(folder / "model", kind, {**config, "vocab_size": vocab_size or config["vocab_size"]})
        self.weights = models.weights_of(folder / "model", recipe, folder / "store")
        self.plan: Plan = models.plan_for(self.weights.model, self.weights.recipe, chunk_tokens=16, **plan)
        self.files = folder / "out"
        self.files.mkdir()
        export(self.plan, self.weights, self.files, models.quiet, accuracy_level=level)

    @property
    def spacing(self) -> int:
        """The tokens between two checkpoints."""
        found = recurrent.checkpoint_tokens(self.plan.model)
        assert found is not None and found < 10
        return found

    def open(self, *, exact: bool = False) -> OnnxEngine:
        return OnnxEngine(self.plan, self.files, exact=exact)


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp(request.param), request.param, "s4-g64", FAST, sequences=8)


@pytest.mark.parametrize("spacing", [SPACING, 128])
def test_exact_mode_is_bitwise(made: Made, spacing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "LEAST_TOKENS", spacing)
    check_engine(lambda: made.open(exact=True), exact=True, tolerance=0, sequences=60)


@pytest.mark.parametrize("kv_bits", [32, 16, 8])
@pytest.mark.parametrize("family", ["lfm2, five taps, with biases", "qwen3_5, more heads of values, with biases"])
def test_default_mode_equals_up_to_rounding(
    tmp_path: Path, family: str, kv_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "TOKENS_AT_ONCE", 5)
    monkeypatch.setattr(parts, "MOST_UNCERTAIN", 4)  # a piece holds all of them
    made = Made(tmp_path, family, "s4-g64", EXACT)

    def narrow() -> OnnxEngine:
        engine = made.open()
        engine.abilities = engine.abilities.model_copy(update={"kv_bits": (kv_bits,)})
        return engine

    check_engine(narrow, exact=False, tolerance=1e-5 if kv_bits == 32 else 0.1, sequences=40)


@pytest.mark.parametrize("family", models.RECURRENT)
def test_greedy_text_equals_transformers_for_64_tokens(tmp_path: Path, family: str) -> None:
    made = Made(tmp_path, family, "float32", FAST)
    reference, engine = models.reference_of(tmp_path / "model", made.weights), made.open()
    state, text = engine.start(made.plan.storage), TOKENS[:12]
    logits = engine.forward([Chunk(state, text, 1)])[0]
    for _ in range(64):
        text = [*text, int(logits[-1].argmax())]
        logits = engine.forward([Chunk(state, text[-1:], 1)])[0]
    assert text[12:] == [int(row.argmax()) for row in models.logits_of(reference, text)[11:-1]]
    engine.close()


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5"])
def test_drafts_change_no_text_in_exact_mode(tmp_path: Path, family: str) -> None:
    """Proposals that are often right and often wrong, and those of a text that repeats itself."""
    size = codec().vocabulary
    made = Made(tmp_path, family, "s4-g32", FAST, vocab_size=size)
    few = {"logit_bias": dict.fromkeys(range(40, 46), 100.0)}
    asked = [{}, few, few | {"temperature": 2.0, "seed": 3}]
    prompts = [[(7 * place + 3 * step) % size for step in range(4 + place)] for place in range(6)]

    def answers(drafter: str | None, text: list[int], window: int | None) -> tuple[list[tuple[int, ...]], int, int]:
        engine = made.open(exact=True)
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


def test_eight_in_a_batch_equal_eight_alone(made: Made) -> None:
    """Also after states between them were freed, whose slots others take."""
    engine = made.open()
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
            assert np.abs(rows - expected).max() <= 0.05 * np.abs(expected).max(), (place, index)
        if place in (3, 6):
            states.pop(1).close()
            alone.pop(1)
    engine.close()


def test_saved_state_continues_equally_in_another_engine(made: Made, tmp_path: Path) -> None:
    first = made.open(exact=True)
    state = first.start(first.plan.storage)
    feed(first, state, TOKENS[:30])
    state.save(0, 30).write(tmp_path / "state")
    expected = feed(first, state, TOKENS[30:40], 10)
    first.close()
    second = made.open(exact=True)
    again = second.start(second.plan.storage)
    again.restore(second.read_segment(tmp_path / "state"))
    assert again.num_replayed == 0
    np.testing.assert_array_equal(feed(second, again, TOKENS[30:40], 10), expected)
    second.close()


def test_segments_with_wrong_checkpoints_or_tokens_are_refused(made: Made, tmp_path: Path) -> None:
    engine = made.open()
    state = engine.start(engine.plan.storage)
    feed(engine, state, TOKENS[:10])
    segment = state.save(0, 10)
    places = sorted(segment.checkpoints)
    assert places == [*range(made.spacing, 10, made.spacing), 10]
    segment.arrays[0][0, 3] = engine.abilities.vocabulary
    segment.write(tmp_path / "tokens")
    with pytest.raises(DamagedArtifact, match="outside the vocabulary"):
        engine.read_segment(tmp_path / "tokens")
    for name, wrong in (("before", [0, *places[1:]]), ("twice", [10, *places[1:]])):
        state.save(0, 10).write(tmp_path / name)
        old, new = json.dumps(places).encode(), json.dumps(wrong).encode()
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes().replace(old, new))
        with pytest.raises(Exception, match="checkpoints after"):
            engine.read_segment(tmp_path / name)
    engine.close()


def test_a_prefix_hit_computes_the_suffix_and_at_most_one_gap(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made.open(exact=True)
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
        assert 15 <= sum(computed) < 15 + made.spacing, (shared, computed)
        plain = engine.start(engine.plan.storage)
        np.testing.assert_array_equal(found, feed(engine, plain, prompt, 3), str(shared))
        reuse.keep(state, prompt)
        state.close()
        plain.close()
    engine.close()


def test_exits_and_cuda_are_refused_by_name(made: Made, tmp_path: Path) -> None:
    for change, word in (({"exits": (1,)}, "exits"), ({"backend": "cuda"}, "cuda")):
        plan = made.plan.model_copy(update=change)
        storage = plan.storage.model_copy(update={"kv_bits": 16}) if word == "cuda" else plan.storage
        with pytest.raises(Unsupported, match=f"{word}.* recurrent layers of"):
            export(plan.model_copy(update={"storage": storage}), made.weights, tmp_path, models.quiet)
