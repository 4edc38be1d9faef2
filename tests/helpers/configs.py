"""More configs as published, and tiny ones of every family; tests may read, change and shrink them."""

from __future__ import annotations

import json
from pathlib import Path

from shapes import GEMMA_2_2B, GEMMA_3_1B, LLAMA_2_70B, LLAMA_31_8B, LLAMA_32_1B, LLAMA_32_3B, QWEN_25_7B, Config

_DATA = Path(__file__).parents[1] / "data"
_LONG: dict[str, Config] = json.loads((_DATA / "long_configs.json").read_text())
LLAMA_2_7B: Config = LLAMA_2_70B | {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32,
}  # fmt: skip
MISTRAL_7B: Config = {
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip
QWEN_25_HALF_B: Config = QWEN_25_7B | {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "use_sliding_window": False,
    "sliding_window": 32768, "max_window_layers": 21, "eos_token_id": 151645,
}  # fmt: skip
QWEN_3_8B: Config = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": False,
    "attention_bias": False, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 36,
}  # fmt: skip
QWEN_3_SMALL: Config = QWEN_3_8B | {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "tie_word_embeddings": True, "max_window_layers": 28,
}  # fmt: skip
SMOLLM2_135M: Config = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 100000, "rope_scaling": None, "tie_word_embeddings": True,
    "rope_interleaved": False, "attention_bias": False,
}  # fmt: skip
SMOLLM3_3B: Config = {
    "model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256, "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6, "rope_theta": 5000000.0, "rope_scaling": None, "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 28,
    "layer_types": ["full_attention"] * 36, "mlp_bias": False, "attention_bias": False, "eos_token_id": 128012,
}  # fmt: skip
PHI_3_MINI: Config = {
    "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
    "sliding_window": 2047, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 32000,
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
}  # fmt: skip
PHI_4_MINI: Config = PHI_3_MINI | {
    "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064, "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.75, "sliding_window": 262144, "tie_word_embeddings": True, "eos_token_id": 199999,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48,
                     "long_factor": [round(1 + index * 0.9, 3) for index in range(48)]},
}  # fmt: skip
MIXTRAL_8X7B: Config = MISTRAL_7B | {
    "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1000000.0,
    "sliding_window": None,
}  # fmt: skip
QWEN_3_30B_A3B: Config = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True, "use_sliding_window": False, "sliding_window": None,
}  # fmt: skip
GPT_OSS_20B: Config = _LONG["GPT_OSS_20B"]
GEMMA_3N_E2B: Config = _LONG["GEMMA_3N_E2B"]
GEMMA_4_SMALL: Config = _LONG["GEMMA_4_SMALL"]
GEMMA_4_EXPERTS: Config = {
    "model_type": "gemma4_text", "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512,
    "num_global_key_value_heads": 2, "attention_k_eq_v": True, "vocab_size": 262144, "hidden_size_per_layer_input": 0,
    "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
    "sliding_window": 1024, "max_position_embeddings": 262144,
}  # fmt: skip

ERNIE_45_SMALL: Config = {
    "model_type": "ernie4_5", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 103424,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "use_bias": False,
}  # fmt: skip
OLMO_2_1B: Config = {
    "model_type": "olmo2", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 100352, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 500000, "rope_scaling": None, "tie_word_embeddings": False,
}  # fmt: skip
LFM2_350M: Config = _LONG["LFM2_350M"]
QWEN_35_SMALL: Config = _LONG["QWEN_35_SMALL"]
PUBLISHED: dict[str, Config] = {
    "Llama-2-7B": LLAMA_2_7B, "Llama-2-70B": LLAMA_2_70B, "Llama-3.2-1B": LLAMA_32_1B, "Llama-3.2-3B": LLAMA_32_3B,
    "Llama-3.1-8B": LLAMA_31_8B, "Mistral-7B": MISTRAL_7B, "Qwen2.5-0.5B": QWEN_25_HALF_B, "Qwen2.5-7B": QWEN_25_7B,
    "Qwen3-0.6B": QWEN_3_SMALL, "Qwen3-8B": QWEN_3_8B, "SmolLM2-135M": SMOLLM2_135M, "SmolLM3-3B": SMOLLM3_3B,
    "Phi-3-mini": PHI_3_MINI, "Phi-4-mini": PHI_4_MINI, "Gemma-2-2B": GEMMA_2_2B, "Gemma-3-1B": GEMMA_3_1B,
    "Mixtral-8x7B": MIXTRAL_8X7B, "Qwen3-30B-A3B": QWEN_3_30B_A3B, "gpt-oss-20b": GPT_OSS_20B,
    "Gemma-3n-E2B": GEMMA_3N_E2B,
    "Gemma-4-small": GEMMA_4_SMALL, "Gemma-4-experts": GEMMA_4_EXPERTS,
    "ERNIE-4.5-0.3B": ERNIE_45_SMALL, "OLMo-2-1B": OLMO_2_1B,
    "LFM2-350M": LFM2_350M, "Qwen3.5-0.8B": QWEN_35_SMALL,
}  # fmt: skip

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
