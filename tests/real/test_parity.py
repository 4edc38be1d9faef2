"""The first layers of real models: engines against transformers in float32, and against each other in four bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_files import Export, edgekit, require

import edgekit as api
from edgekit.contracts.engine import Chunk

pytestmark = [pytest.mark.real, pytest.mark.quantize, pytest.mark.slow]
TEXT = "def softmax(x):\n    e = np.exp(x - x.max())\n    return e / e.sum()\n\n\nDie Straße führt 3.14 km nach 東京. "
# target → the package it needs, its widest float recipe, and the largest difference as a share of the largest logit
TARGETS = {
    "onnx": ("onnxruntime", "float32", 2e-3),
    "mlx": ("mlx", "float16", 2e-2),
    "executorch": ("executorch", "float32", 2e-3),
    "llamacpp": ("xllamacpp", "float32", 1e-2),
}


def reference_logits(folder: Path, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits: np.ndarray[Any, Any] = model(torch.tensor([list(tokens)])).logits[0].numpy()
    return logits


def engine_logits(artifact: Path, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    with api.open(artifact, context=len(tokens) + 8) as runtime:
        state = runtime.engine.start(runtime.kv_config)
        try:
            most = runtime.engine.capabilities.max_chunk_tokens
            parts = [tokens[place : place + most] for place in range(0, len(tokens), most)]
            return np.concatenate(
                [np.array(runtime.engine.forward([Chunk(state, part, len(part))])[0]) for part in parts]
            )
        finally:
            state.close()


@pytest.mark.parametrize(
    "target", ["onnx", "llamacpp", *(pytest.param(slower, marks=pytest.mark.long) for slower in ("mlx", "executorch"))]
)
@pytest.mark.parametrize("model", ["smollm2", pytest.param("gemma3", marks=pytest.mark.long)])
def test_float_logits_are_those_of_transformers(
    model: str, target: str, request: pytest.FixtureRequest, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, recipe, bound = TARGETS[target]
    require(package)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder: Path = request.getfixturevalue(f"{model}_short")
    artifact = export(folder, target, "--recipe", recipe)
    with api.open(artifact, context=64) as runtime:
        tokens = runtime.codec.encode(TEXT, add_special_tokens=True)[:40]
    expected, actual = reference_logits(folder, tokens), engine_logits(artifact, tokens)
    assert np.abs(actual - expected).max() < bound * np.abs(expected).max()
    assert (actual.argmax(-1) == expected.argmax(-1)).mean() > 0.97


@pytest.mark.onnx
@pytest.mark.long
def test_gemmas_window_is_honoured_beyond_its_edge(gemma3_short: Path, export: Export) -> None:
    """Six hundred tokens, the window of most layers being 512."""
    pytest.importorskip("onnxruntime")
    artifact = export(gemma3_short, "onnx", "--recipe", "float32")
    with api.open(artifact, context=1024) as runtime:
        tokens = runtime.codec.encode(TEXT * 20, add_special_tokens=True)[:600]
    expected, actual = reference_logits(gemma3_short, tokens), engine_logits(artifact, tokens)
    assert np.abs(actual[-40:] - expected[-40:]).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("recipe", ["s4-g64", pytest.param("s8", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "target",
    [
        pytest.param("mlx", marks=[pytest.mark.mlx, pytest.mark.long]),
        pytest.param("llamacpp", marks=pytest.mark.llamacpp),
    ],
)
@pytest.mark.onnx
def test_two_targets_hold_the_same_integers(smollm2_short: Path, export: Export, target: str, recipe: str) -> None:
    for needed in ("onnx", target):
        require(TARGETS[needed][0])
    first, second = (export(smollm2_short, each, "--recipe", recipe, "--method", "rtn") for each in ("onnx", target))
    shown = edgekit("parity", first, second, "--tokens", "64")  # mlx reads few tokens a second on a CPU
    assert "bit for bit" in shown or "equal" in shown
    assert "differ" not in shown
