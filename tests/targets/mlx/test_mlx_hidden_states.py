"""Hidden states of the mlx target: those of transformers, at no cost to calls that do not ask for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("mlx.core")

import mlx_models
from eagle3_heads import features_of, torch_features, write_head
from edgekit_mlx.engine import MlxEngine
from edgekit_mlx.memory import Preparation

from edgekit.contracts.engine import Chunk
from edgekit.model.heads import read_head
from edgekit.testing import check_engine

pytestmark = [pytest.mark.mlx, pytest.mark.quantize]


HYBRIDS = ("lfm2", "qwen3_5")


def opened(folder: Path, family: str, *, exact: bool = False, **plan: Any) -> MlxEngine:
    """An engine whose plan has a head that reads the first and the last two layers, and the first once more."""
    made = mlx_models.made(family, **plan)
    model, head = made.plan.model, folder / "head"
    count = len(model.layers)
    if not head.is_dir():
        write_head(head, model, layers=(1, max(1, count - 1), count, 1))
    planned = made.plan.model_copy(update={"drafter": read_head(head, model).spec})
    return MlxEngine(planned, made.files, exact=exact)


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "gemma4", "qwen3_moe", *HYBRIDS])
def test_hidden_states_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    engine, tokens = opened(tmp_path, family), mlx_models.tokens_of(50)
    assert engine.plan.drafter is not None
    found = features_of(engine, tokens, [40, 1, 9])
    engine.close()
    expected = torch_features(mlx_models.reference(family, "s4-g32"), tokens, engine.plan.drafter.hidden_layers)
    assert mlx_models.apart(found, expected) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma2", *HYBRIDS])
def test_conformance_holds_with_hidden_states(tmp_path: Path, family: str) -> None:
    check_engine(lambda: opened(tmp_path, family), exact=True, tolerance=0.0, sequences=8)


def test_a_gpus_exact_mode_gives_them_token_by_token_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and activations have 16 bits, as on a Mac; the CPU computes them slowly."""
    monkeypatch.setattr("edgekit_mlx.engine.prepare", lambda plan: Preparation(True, ()))
    engine = opened(tmp_path, "llama", exact=True, backend="metal", kv_bits=16)
    tokens = mlx_models.tokens_of(12)
    found = features_of(engine, tokens, [12])
    np.testing.assert_array_equal(found, features_of(engine, tokens, [5, 7]))
    assert engine.plan.drafter is not None
    expected = torch_features(mlx_models.reference("llama", "s4-g32"), tokens, engine.plan.drafter.hidden_layers)
    assert 0 < mlx_models.apart(found, expected) < 0.02
    engine.close()


def test_calls_without_a_request_compute_no_hidden_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, wanted = opened(tmp_path, "llama"), list[set[int]]()
    body = engine._decoder.body

    def watched(ids: Any, runs: Any, layers: Any, added: Any) -> Any:
        wanted.append(set(layers))
        return body(ids, runs, layers, added)

    monkeypatch.setattr(engine._decoder, "body", watched)
    last = len(engine.plan.model.layers)
    state = engine.start(engine.plan.storage)
    engine.forward([Chunk(state, [1, 2], 1)])
    state.close()
    features_of(engine, [1, 2, 3], [3])
    assert wanted == [{last}, {1, max(1, last - 1), last}]
    engine.close()
