"""Configs as published, and tiny ones of every family; tests may read, change and shrink them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Config = dict[str, Any]
_DATA = Path(__file__).parents[1] / "data"
PUBLISHED: dict[str, Config] = json.loads((_DATA / "published_configs.json").read_text())
LLAMA_2_7B = PUBLISHED["Llama-2-7B"]
LLAMA_2_70B = PUBLISHED["Llama-2-70B"]
LLAMA_32_1B = PUBLISHED["Llama-3.2-1B"]
LLAMA_32_3B = PUBLISHED["Llama-3.2-3B"]
LLAMA_31_8B = PUBLISHED["Llama-3.1-8B"]
MISTRAL_7B = PUBLISHED["Mistral-7B"]
QWEN_25_HALF_B = PUBLISHED["Qwen2.5-0.5B"]
QWEN_25_7B = PUBLISHED["Qwen2.5-7B"]
QWEN_3_SMALL = PUBLISHED["Qwen3-0.6B"]
QWEN_3_8B = PUBLISHED["Qwen3-8B"]
SMOLLM2_135M = PUBLISHED["SmolLM2-135M"]
PHI_3_MINI = PUBLISHED["Phi-3-mini"]
PHI_4_MINI = PUBLISHED["Phi-4-mini"]
GEMMA_2_2B = PUBLISHED["Gemma-2-2B"]
GEMMA_3_1B = PUBLISHED["Gemma-3-1B"]
QWEN_3_30B_A3B = PUBLISHED["Qwen3-30B-A3B"]
GPT_OSS_20B = PUBLISHED["gpt-oss-20b"]
GEMMA_3N_E2B = PUBLISHED["Gemma-3n-E2B"]
QWEN_35_SMALL = PUBLISHED["Qwen3.5-0.8B"]

SMALL: Config = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_TINY = json.loads((_DATA / "tiny_configs.json").read_text())
TINY: dict[str, Config] = {name: SMALL | config for name, config in _TINY.items()}


def write_config(folder: Path, config: Config) -> Path:
    """A model folder that holds a config and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
