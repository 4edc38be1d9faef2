"""Checkpoints with outliers where real models have them: in keys, values, inputs of `down` and embeddings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import family_models as models
import numpy as np
import runtimes
from safetensors_files import write_tensors

from edgekit.formats.safetensors import TensorFolder
from edgekit.model.source import open_source

_WEIGHTS = "model.safetensors"


def plant(folder: Path, factor: float) -> None:
    """Multiply a few channels of a tiny model's weights by `factor`; biases of keys get it as their value."""
    draw = np.random.default_rng(0)

    def change(name: str, values: np.ndarray[Any, Any]) -> None:
        if name.endswith("k_proj.bias"):
            values[draw.choice(len(values), 3, replace=False)] = factor * draw.choice([-1.0, 1.0], 3)
        elif name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight", "w3.weight")):
            values[draw.choice(len(values), 2, replace=False)] *= factor
        elif name.endswith("embed_tokens.weight"):
            values[0] = draw.standard_normal(values.shape[1])  # transformers makes the padding's zero, and feeds none
            values[:, draw.choice(values.shape[1], 2, replace=False)] *= factor

    rewrite(folder, change)


def rewrite(folder: Path, change: Any) -> None:
    """Apply `change(name, values)`, which works in place, to every tensor of the folder."""
    with TensorFolder.open(folder / _WEIGHTS) as stored:
        tensors = {name: np.array(stored.floats(name)) for name in stored.entries}
    for name, values in tensors.items():
        change(name, values)
    write_tensors(folder, tensors)


def family(folder: Path, kind: str, config: dict[str, Any], factor: float) -> Path:
    """A tiny model of a family, with outliers, a tokenizer, and heads that every narrow cache can hold."""
    tokenizer = runtimes.byte_level()
    wide = {} if kind in ("gemma4_text", "lfm2_moe", "phi3") else {"head_dim": 64}
    if "query_pre_attn_scalar" in config:
        wide["query_pre_attn_scalar"] = 64
    vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
    inputs = {"vocab_size_per_layer_input": vocabulary} if kind == "gemma4_text" else {}
    models.write_model(folder, kind, {**config, **wide, **inputs, "vocab_size": vocabulary})
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    plant(folder, factor)
    return folder


def biased(folder: Path, size: float, name: str = "demo") -> Path:
    """A bundled model as a Qwen2 with an untied head, small biases of values, and key biases of up to `size`.

    The latter lie on the slowest pair of rotary channels, which hardly turns within a short text: they change the
    scores of all keys alike, so that the model predicts as without them, but a narrow cache must hold them.
    """
    bundled = open_source(name).folder
    folder.mkdir()
    for path in bundled.iterdir():
        if path.name not in ("config.json", _WEIGHTS):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((bundled / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in ("attention_bias", "mlp_bias")}
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    with TensorFolder.open(bundled / _WEIGHTS) as stored:
        tensors = {name: np.array(stored.floats(name)) for name in stored.entries}
    draw = np.random.default_rng(0)
    half = config["head_dim"] // 2
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        bias = np.zeros((len(tensors[name]) // (2 * half), 2 * half), np.float32)
        if "k_proj" in name:
            bias[:, half - 1] = size * draw.uniform(0.5, 1, len(bias))
            bias[:, -1] = -size * draw.uniform(0.5, 1, len(bias))
        if "v_proj" in name:
            bias[:] = 0.5 * draw.standard_normal(bias.shape)
        tensors[name.replace(".weight", ".bias")] = bias.ravel()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_tensors(folder, tensors)
    return folder
