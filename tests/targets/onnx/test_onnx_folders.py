"""Published folders, scaled down: shards, padded vocabularies, models inside larger ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import family_models as models
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import EXACT, export
from engines import apart, fed

from edgekit.contracts.neutral import NeutralWeights
from edgekit.formats.safetensors import INDEX, TensorFolder

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]

TOKENS = models.tokens_of(36)


def check_logits(folder: Path, weights: NeutralWeights, expected: np.ndarray[Any, Any]) -> None:
    """The exported graphs give these logits; the last tokens are decoded one by one."""
    out = folder / "out"
    out.mkdir()
    made = models.plan_for(weights.model, weights.recipe)
    export(made, weights, out, models.quiet, accuracy_level=EXACT)
    engine = OnnxEngine(made, out)
    found = fed(engine, engine.start(made.storage), TOKENS, [30, *[1] * 6])
    engine.close()
    assert apart(found, expected) < 1e-5


def shard(folder: Path, rename: str = "") -> None:
    """Split `model.safetensors` into two shards with an index; names may get a prefix."""
    import torch
    from safetensors.torch import save_file

    with TensorFolder.open(folder) as tensors:
        whole = {f"{rename}{name}": torch.from_numpy(np.array(tensors.floats(name))) for name in tensors.entries}
    (folder / "model.safetensors").unlink()
    names, weight_map = sorted(whole), {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: whole[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_and_a_padded_vocabulary(tmp_path: Path) -> None:
    """Qwen's embedding is padded beyond the tokenizer's tokens and tied, and its files are sharded."""
    kind, config = models.FAMILIES["qwen2"]
    models.write_model(tmp_path / "model", kind, {**config, "vocab_size": 184})
    shard(tmp_path / "model")
    weights = models.weights_of(tmp_path / "model", "s4-g64", tmp_path / "store")
    check_logits(tmp_path, weights, models.logits_of(models.reference_of(tmp_path / "model", weights), TOKENS))


def test_text_model_of_vision_model(tmp_path: Path) -> None:
    """Gemma 3 4B and up: `text_config`, and another prefix before every name; two ropes, windows, q and k norms."""
    kind, config = models.FAMILIES["gemma3"]
    models.write_model(tmp_path / "text", kind, config)
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    folder = tmp_path / "model"
    (tmp_path / "text").rename(folder)
    plain = models.weights_of(folder, "s4-g32", tmp_path / "plain")
    expected = models.logits_of(models.reference_of(folder, plain), TOKENS)
    shard(folder, rename="language_model.")
    wrapped = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106], "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(wrapped))
    weights = models.weights_of(folder, "s4-g32", tmp_path / "store")
    assert weights.model.prefix == "language_model.model."
    check_logits(tmp_path, weights, expected)
