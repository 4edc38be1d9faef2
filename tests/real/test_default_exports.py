"""`edgekit export` with no option but the target, of whole real models, on every target: each is sealed and answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_files import Export, edgekit, manifest

pytestmark = [pytest.mark.real, pytest.mark.quantize, pytest.mark.slow, pytest.mark.long]
PACKAGES = {"onnx": "onnxruntime", "mlx": "mlx", "executorch": "executorch"}


@pytest.mark.parametrize("target", PACKAGES)
@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_default_export_is_sealed_and_answers(
    model: str, target: str, request: pytest.FixtureRequest, export: Export
) -> None:
    pytest.importorskip(PACKAGES[target])
    file: Path = request.getfixturevalue(f"{model}_file")
    artifact = export(file, target)
    assert manifest(artifact)["self_check"].startswith("KL ")
    answer = json.loads(edgekit("run", artifact, "The capital of France is", "--raw", "--max-tokens", "6", "--json"))
    assert "Paris" in answer["text"]
