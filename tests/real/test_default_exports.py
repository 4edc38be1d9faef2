"""`edgekit export` with no option but the device, of whole real models: each target is sealed and answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_files import edgekit, manifest, require

pytestmark = [pytest.mark.real, pytest.mark.quantize, pytest.mark.slow, pytest.mark.long]
# target → the package that it needs, and a device for which a plan chooses it. llamacpp is chosen only where it is
# measured to be the fastest, so it is asked for.
TARGETS = {
    "onnx": ("onnxruntime", ["laptop-x86-8gb"]),
    "mlx": ("mlx", ["macbook-m4-16gb"]),
    "executorch": ("executorch", ["pixel-9"]),
    "llamacpp": ("xllamacpp", ["this", "--target", "llamacpp"]),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_default_export_is_sealed_and_answers(
    model: str, target: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    package, device = TARGETS[target]
    require(package)
    file: Path = request.getfixturevalue(f"{model}_file")
    edgekit("export", file, "--device", *device, "-o", tmp_path / "artifact")
    sealed = manifest(tmp_path / "artifact")
    assert sealed["plan"]["target"] == target
    assert sealed["self_check"].startswith("KL ")
    asked = ("The capital of France is", "--raw", "--max-tokens", "6", "--json")
    assert "Paris" in json.loads(edgekit("run", tmp_path / "artifact", *asked))["text"]
