"""Hidden states of the onnx target: those of transformers, at no cost to calls that do not ask for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import onnx
from eagle3_heads import torch_features, write_head
from edgekit_onnx import runner
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import EXACT, FAST
from onnx_models import OnnxModel, onnx_model

from edgekit.contracts.engine import Chunk
from edgekit.contracts.feeding import feed
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.errors import DamagedArtifact
from edgekit.model.heads import read_head
from edgekit.testing import check_engine

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]

STORAGE = KVCacheConfig(capacity_tokens=64, kv_bits=32)

HYBRIDS = ("lfm2", "qwen3_5")


def with_head(folder: Path, family: str, level: int, **plan: Any) -> OnnxModel:
    """A small model that gives hidden states after its first layers."""
    model = onnx_model(family).weights.model
    head = write_head(folder / "head", model, layers=(1, 2, 3)[: len(model.layers)])
    return onnx_model(family, level=level, drafter=read_head(head, model).spec, **plan)


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_hidden_states_beside_a_narrow_cache(tmp_path: Path, kv_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ by the cache's rounding alone, also where a call is cut into pieces."""
    monkeypatch.setattr(runner, "TOKENS_AT_ONCE", 5)
    made = with_head(tmp_path, "llama", EXACT)
    engine = made.open()
    tokens = np.random.default_rng(0).integers(0, made.plan.model.vocab_size, 20).tolist()
    wide, narrow = (np.empty((20, engine.capabilities.feature_width), np.float32) for _ in range(2))
    for bits, hidden in ((32, wide), (kv_bits, narrow)):
        state = engine.start(STORAGE.model_copy(update={"kv_bits": bits}))
        engine.forward([Chunk(state, tokens[:16], 0, features=hidden[:16])])
        engine.forward([Chunk(state, tokens[16:], 1, features=hidden[16:])])
        state.close()
    assert 0 < np.sqrt(np.mean((wide - narrow) ** 2)) / wide.std() <= 0.2
    engine.close()


@pytest.mark.parametrize(
    ("family", "exits"),
    [(family, exits) for family in ("llama", "gemma2", "phi3") for exits in ((), (1,))]
    + [(each, ()) for each in (*HYBRIDS, "gemma4")],
)
def test_hidden_states_are_those_of_transformers(tmp_path: Path, family: str, exits: tuple[int, ...]) -> None:
    made = with_head(tmp_path, family, EXACT, exits=exits)
    engine = made.open()
    tokens = np.random.default_rng(0).integers(0, made.plan.model.vocab_size, 20).tolist()
    hidden = np.empty((20, engine.capabilities.feature_width), np.float32)
    state = engine.start(STORAGE)
    engine.forward([Chunk(state, tokens[:16], 0, features=hidden[:16])])
    engine.forward([Chunk(state, tokens[16:], 4, features=hidden[16:])])
    expected = torch_features(made.reference(), tokens, made.plan.drafter.hidden_layers)
    np.testing.assert_allclose(hidden, expected, atol=1e-4 * np.abs(expected).max())
    engine.close()


def test_conformance_holds_with_hidden_states_and_exits_in_exact_mode(tmp_path: Path) -> None:
    made = with_head(tmp_path, "llama", FAST, exits=(1,))
    check_engine(lambda: made.open(exact=True), exact=True, tolerance=0, sequences=25)
    check_engine(made.open, exact=False, tolerance=0.05, sequences=10)


@pytest.mark.parametrize("family", HYBRIDS)
def test_conformance_holds_with_hidden_states_beside_recurrent_layers(tmp_path: Path, family: str) -> None:
    made = with_head(tmp_path, family, FAST)
    check_engine(lambda: made.open(exact=True), exact=True, tolerance=0, sequences=10)
    check_engine(made.open, exact=False, tolerance=0.05, sequences=5)


def test_a_plan_without_a_head_writes_the_graphs_as_before_and_equal_logits(tmp_path: Path) -> None:
    made = with_head(tmp_path, "llama", FAST)
    plain = made.plan.model_copy(update={"drafter": None})
    files = onnx_model("llama", level=FAST).files
    assert (files / "weights.bin").read_bytes() == (made.files / "weights.bin").read_bytes()
    outputs = [
        {value.name for value in onnx.load(path, load_external_data=False).graph.output}
        for folder in (files, made.files)
        for path in folder.glob("body-*.onnx")
    ]
    assert outputs[1] - outputs[0] == {f"hidden.{layer}" for layer in (1, 2) if layer < len(plain.model.layers)}
    logits = []
    for chosen, folder in ((plain, files), (made.plan, made.files)):
        engine = OnnxEngine(chosen, folder, exact=True)
        logits.append(feed(engine, engine.start(STORAGE), [5, 6, 7, 8, 9], 3))
        engine.close()
    np.testing.assert_array_equal(*logits)
    with pytest.raises(DamagedArtifact, match="has the outputs"):
        OnnxEngine(made.plan, files)
