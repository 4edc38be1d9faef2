"""Layers that share keys and values and have inputs of their own (Gemma 4) on onnxruntime: caches and graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import family_models as models
from edgekit_onnx.audit import audit
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import FAST
from edgekit_onnx.prepacking import pack
from onnx_models import OnnxModel, onnx_model

from edgekit.contracts.feeding import feed
from edgekit.contracts.token_costs import kv_bytes
from edgekit.errors import DamagedArtifact

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]

TOKENS = [int(token) for token in models.tokens_of(120, seed=3)]


@pytest.fixture(scope="module")
def made() -> OnnxModel:
    return onnx_model("gemma4", "s4-g64", FAST, sequences=8)


def test_the_cache_of_shared_layers_is_stored_once(made: OnnxModel) -> None:
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


def test_packed_graphs_give_the_same_bits(tmp_path: Path) -> None:
    """With more layers than a small constant could name."""
    kinds = ["sliding_attention", "full_attention"] * 6
    made = onnx_model("gemma4", level=FAST, config={"num_hidden_layers": 12, "layer_types": kinds})
    folder = tmp_path / "packed"
    folder.mkdir()
    pack(made.files, 1, 32, audit(made.plan, made.files), folder)
    assert {path.suffix for path in folder.iterdir()} == {".onnx", ".bin"}


def test_a_second_table_of_other_sizes_is_refused(made: OnnxModel) -> None:
    smaller = made.plan.model.model_copy(
        update={"per_layer_input": made.plan.model.per_layer_input.model_copy(update={"vocab_size": 159})}  # type: ignore[union-attr]
    )
    with pytest.raises(DamagedArtifact, match="does not fit its table"):
        OnnxEngine(made.plan.model_copy(update={"model": smaller}), made.files)
