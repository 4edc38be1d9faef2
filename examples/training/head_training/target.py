"""The model that a head is trained for, from what edgekit reads: a folder, a GGUF file, a hub id, a bundled name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from edgekit.model.source import open_source, open_tensors


def open_target(given: str) -> tuple[Any, Any, Path]:
    """Return the model in float32 and its tokenizer, as transformers' own classes, and its `tokenizer.json`.

    Quantised weights are used as floats.
    """
    source = open_source(given, need_weights=True)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source.folder), dtype=torch.float32)
    tensors = open_tensors(source.weights)
    with torch.no_grad():
        for name, value in model.named_parameters():  # a tied head is named once
            value.copy_(torch.from_numpy(tensors.floats(name).copy()).reshape(value.shape))
    return model.eval(), AutoTokenizer.from_pretrained(source.folder), source.folder / "tokenizer.json"
