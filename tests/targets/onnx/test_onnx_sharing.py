"""Layers that share keys and values and have inputs of their own (Gemma 4) on onnxruntime: the suite, texts, states."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import family_models as models
from edgekit_onnx.audit import audit
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import EXACT, FAST, export
from edgekit_onnx.prepacking import pack
from runtimes import codec
from speculating import check_drafts_change_no_text

from edgekit.contracts.engine import Chunk
from edgekit.contracts.feeding import feed
from edgekit.contracts.plan import Plan
from edgekit.contracts.token_costs import kv_bytes
from edgekit.errors import DamagedArtifact, Unsupported
from edgekit.runtime.memory.budget import MemoryBudget
from edgekit.runtime.prefix_cache.tree import Prefixes, PrefixKey, Reuse
from edgekit.testing import check_engine

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]

TOKENS = [int(token) for token in models.tokens_of(120, seed=3)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test its own facts of the machine."""
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))


class Made:
    """The exported files of a tiny model, which tests open."""

    def __init__(
        self, folder: Path, family: str, recipe: str, level: int, *, vocabulary: int = 160, layers: int = 6, **plan: Any
    ) -> None:
        kind, config = models.SHARING[family]
        sizes: dict[str, Any] = {
            "vocab_size": vocabulary,
            "vocab_size_per_layer_input": vocabulary,
            "num_hidden_layers": layers,
        }
        sizes["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
        models.write_model(folder / "model", kind, {**config, **sizes})
        self.weights = models.weights_of(folder / "model", recipe, folder / "store")
        self.plan: Plan = models.plan_for(self.weights.model, self.weights.recipe, **{"chunk_tokens": 16, **plan})
        self.files = folder / "out"
        self.files.mkdir()
        export(self.plan, self.weights, self.files, models.quiet, accuracy_level=level)

    def open(self, *, exact: bool = False) -> OnnxEngine:
        return OnnxEngine(self.plan, self.files, exact=exact)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("gemma4"), "gemma4", "s4-g64", FAST, sequences=8)


def test_exact_mode_is_bitwise(made: Made) -> None:
    check_engine(lambda: made.open(exact=True), exact=True, tolerance=0, sequences=60)


@pytest.mark.parametrize(("family", "kv_bits"), [("gemma4", 16), ("gemma4", 8), (list(models.SHARING)[1], 32)])
def test_default_mode_equals_up_to_rounding(tmp_path: Path, family: str, kv_bits: int) -> None:
    made = Made(tmp_path, family, "s4-g64", EXACT)

    def narrow() -> OnnxEngine:
        engine = made.open()
        engine.abilities = engine.abilities.model_copy(update={"kv_bits": (kv_bits,)})
        return engine

    check_engine(narrow, exact=False, tolerance=1e-5 if kv_bits == 32 else 0.1, sequences=40)


@pytest.mark.parametrize("family", models.SHARING)
def test_greedy_text_equals_transformers_for_64_tokens(tmp_path: Path, family: str) -> None:
    """Windows of 12 tokens are left far behind."""
    made = Made(tmp_path, family, "float32", FAST)
    reference, engine = models.reference_of(tmp_path / "model", made.weights), made.open()
    text = models.greedy_text(engine, engine.start(made.plan.storage), TOKENS[:20], first=13)
    assert text[20:] == [int(row.argmax()) for row in models.logits_of(reference, text)[19:-1]]
    engine.close()


def test_the_cache_of_shared_layers_is_stored_once(made: Made) -> None:
    engine = made.open()
    state = engine.start(made.plan.storage)
    feed(engine, state, TOKENS[:40])
    own = [layer for layer in made.plan.model.layers if layer.stores_kv]
    assert (len(own), len(made.plan.model.layers)) == (3, 6)
    segment = state.save(0, 40)
    per_token = sum(2 * layer.kv_heads * layer.head_dim * 4 for layer in own)
    assert sum(array.nbytes for array in segment.arrays) == 40 * per_token
    assert kv_bytes(made.plan.model, 40, 32, bounds_windows=False) == 40 * per_token
    engine.close()


def test_drafts_change_no_text_in_exact_mode(tmp_path: Path) -> None:
    made = Made(tmp_path, "gemma4", "s4-g32", FAST, vocabulary=codec().vocabulary)
    check_drafts_change_no_text(partial(made.open, exact=True))


def test_eight_in_a_batch_equal_eight_alone(made: Made) -> None:
    """In exact mode to the bit."""
    engine = made.open(exact=True)
    prompts = [TOKENS[place : place + 5 + 3 * place] for place in range(8)]
    alone = []
    for prompt in prompts:
        state = engine.start(engine.plan.storage)
        feed(engine, state, prompt)
        alone.append([engine.forward([Chunk(state, [token], 1)])[0] for token in TOKENS[40:50]])
        state.close()
    states = [engine.start(engine.plan.storage) for _ in prompts]
    for state, prompt in zip(states, prompts, strict=True):
        feed(engine, state, prompt)
    for place, token in enumerate(TOKENS[40:50]):
        found = engine.forward([Chunk(state, [token], 1) for state in states])
        for index, rows in enumerate(found):
            np.testing.assert_array_equal(rows, alone[index][place], f"{place}, {index}")
    engine.close()


def test_prefixes_are_reused_and_states_continue_in_another_engine(made: Made, tmp_path: Path) -> None:
    engine = made.open(exact=True)
    reuse = Reuse(Prefixes(MemoryBudget(None)), PrefixKey("", None, 32))
    first = engine.start(engine.plan.storage)
    feed(engine, first, TOKENS[:50])
    reuse.keep(first, TOKENS[:50])
    for shared in (50, 33, 7):
        prompt = [*TOKENS[:shared], *TOKENS[60:75]]
        state, plain = engine.start(engine.plan.storage), engine.start(engine.plan.storage)
        assert reuse.restore(state, prompt, len(prompt) - 1) == shared
        found = feed(engine, state, prompt[shared:], 3)
        np.testing.assert_array_equal(found, feed(engine, plain, prompt, 3), str(shared))
        state.close()
        plain.close()
    first.save(0, 50).write(tmp_path / "state")
    expected = feed(engine, first, TOKENS[50:60], 10)
    engine.close()
    second = made.open(exact=True)
    again = second.start(second.plan.storage)
    again.restore(second.read_segment(tmp_path / "state"))
    np.testing.assert_array_equal(feed(second, again, TOKENS[50:60], 10), expected)
    second.close()


def test_packed_graphs_give_the_same_bits(tmp_path: Path) -> None:
    """With more layers than a small constant could name."""
    made = Made(tmp_path, "gemma4", "s4-g32", FAST, layers=12)
    folder = tmp_path / "packed"
    folder.mkdir()
    pack(made.files, 1, 32, audit(made.plan, made.files), folder)
    assert {path.suffix for path in folder.iterdir()} == {".onnx", ".bin"}


def test_a_second_table_of_other_sizes_is_refused(made: Made) -> None:
    smaller = made.plan.model.model_copy(
        update={"per_layer_input": made.plan.model.per_layer_input.model_copy(update={"vocab_size": 159})}  # type: ignore[union-attr]
    )
    with pytest.raises(DamagedArtifact, match="does not fit its table"):
        OnnxEngine(made.plan.model_copy(update={"model": smaller}), made.files)


def test_exits_and_cuda_are_refused_by_name(made: Made, tmp_path: Path) -> None:
    for change, word in (({"exits": (1,)}, "exits"), ({"backend": "cuda"}, "cuda")):
        plan = made.plan.model_copy(update=change)
        storage = plan.storage.model_copy(update={"kv_bits": 16}) if word == "cuda" else plan.storage
        with pytest.raises(Unsupported, match=f"{word}.* the layers of gemma4_text"):
            export(plan.model_copy(update={"storage": storage}), made.weights, tmp_path, models.quiet)
