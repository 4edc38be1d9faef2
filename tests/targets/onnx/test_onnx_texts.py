"""Greedy texts of onnxruntime equal those of transformers, beyond one chunk and one block of the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import family_models as models
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import EXACT, export

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]


@pytest.mark.parametrize("family", [*models.TWISTED, *models.EXPERTS, *models.HYBRID_EXPERTS])
def test_greedy_text_equals_transformers_for_64_tokens(tmp_path: Path, family: str) -> None:
    models.write_model(tmp_path / "model", *models.EVERY[family])
    recipe = "s4-g32" if family in models.HYBRID_EXPERTS else "float32"
    weights = models.weights_of(tmp_path / "model", recipe, tmp_path / "store")
    plan, files = models.plan_for(weights.model, weights.recipe, chunk_tokens=16), tmp_path / "out"
    files.mkdir()
    export(plan, weights, files, models.quiet, accuracy_level=EXACT)
    reference, engine = models.reference_of(tmp_path / "model", weights), OnnxEngine(plan, files)
    text = models.greedy_text(engine, engine.start(plan.storage), models.tokens_of(20, seed=3), first=13)
    engine.close()
    assert text[20:] == [int(row.argmax()) for row in models.logits_of(reference, text)[19:-1]]
