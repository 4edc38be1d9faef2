"""A small random Llama with a real tokenizer and template, written with numpy alone, and its onnx artifacts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import runtimes
from safetensors_files import write_tensors

from edgekit.artifact.export import export
from edgekit.contracts.recipe import named_recipe
from edgekit.model.families import model_from_config
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest

DEVICE = "laptop-x86-16gb"
TEMPLATE = runtimes.TEMPLATE


def write_tiny(folder: Path, *, seed: int = 0, layers: int = 2, **changed: Any) -> Path:
    """A folder as a Hugging Face model has it."""
    folder.mkdir(parents=True)
    tokenizer = runtimes.byte_level()
    vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": vocabulary, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": True,
        "bos_token_id": 0, "eos_token_id": 1,
    } | changed  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": TEMPLATE}))
    model = model_from_config(config, folder.name, str(folder))
    draw = np.random.default_rng(seed)
    tensors = {tensor.name: tensor for tensor in model.tensors()}
    drawn = {name: draw.standard_normal(each.shape, np.float32) * np.float32(0.2) for name, each in tensors.items()}
    write_tensors(
        folder, {name: drawn[name] + 1 if each.role == "norm" else drawn[name] for name, each in tensors.items()}
    )
    return folder


def artifact_of(model: Path, place: Path, recipe: str = "s4-g32", *, context: int = 256) -> Path:
    """An onnx artifact of it, exported as `edgekit export` does, for one thread: tests run beside each other."""
    wish = PlanRequest(recipe=named_recipe(recipe), target="onnx", context=context)
    plan = make_plans(str(model), [DEVICE], wish)[0]
    return export(plan.model_copy(update={"threads": 1}), place).folder


def text_file(folder: Path) -> Path:
    """Words that the tokenizer knows."""
    place = folder / "text.txt"
    draw = np.random.default_rng(3)
    place.write_text(" ".join(runtimes.WORDS[index] for index in draw.integers(0, len(runtimes.WORDS), 600)))
    return place
