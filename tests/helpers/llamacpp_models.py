"""Tiny models as files of the llamacpp target, made once a session."""

from __future__ import annotations

from typing import Any

import family_models as models
from edgekit_llamacpp.export import export
from exported_models import ExportedModels

_GEMMA = {**models.SMALL, "head_dim": 32, "num_hidden_layers": 6, "sliding_window": 12, "query_pre_attn_scalar": 32}
ONE_LAYER = "one layer"
WIDE_HEADS = "wide heads"
# The families of `family_models`, within what llama.cpp computes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": models.FAMILIES["llama"],
    "llama untied, with biases": models.FAMILIES["llama untied, with biases"],
    "llama 3 rope, wide heads": models.FAMILIES["llama 3 rope, wide heads"],
    "llama with yarn": models.FAMILIES["llama with yarn"],
    "mistral": ("mistral", {**models.SMALL, "sliding_window": None}),
    "qwen2": models.FAMILIES["qwen2"],
    "qwen3": models.FAMILIES["qwen3"],
    "smollm3": ("smollm3", {**models.SMALL, "num_hidden_layers": 5}),
    "phi3": models.FAMILIES["phi3"],
    "gemma2": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**_GEMMA, "rope_parameters": models.GEMMA3_ROPES}),
    ONE_LAYER: ("llama", {**models.SMALL, "num_hidden_layers": 1}),
    WIDE_HEADS: ("llama", {**models.SMALL, "head_dim": 64, "num_key_value_heads": 2}),
}
_MODELS = ExportedModels("llamacpp", FAMILIES, export, kv_bits=16)
folder_of, made, reference = _MODELS.folder_of, _MODELS.made, _MODELS.reference
