"""More configs as published, and tiny ones of every family; tests may read, change and shrink them."""

from __future__ import annotations

import json
from pathlib import Path

from shapes import GEMMA_2_2B, GEMMA_3_1B, LLAMA_2_70B, LLAMA_31_8B, LLAMA_32_1B, LLAMA_32_3B, QWEN_25_7B, Config

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
GPT_OSS_20B: Config = {
    "model_type": "gpt_oss", "attention_bias": True, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999, "rms_norm_eps": 1e-5,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "vocab_size": 201088,
}  # fmt: skip
GEMMA_3N_E2B: Config = {
    "model_type": "gemma3n_text", "hidden_size": 2048, "intermediate_size": [8192] * 30, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 10,
    "laurel_rank": 64, "altup_num_inputs": 4, "sliding_window": 512, "max_position_embeddings": 32768,
    "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rms_norm_eps": 1e-6,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
}  # fmt: skip
GEMMA_4_SMALL: Config = {
    "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True, "sliding_window": 512, "max_position_embeddings": 131072,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "final_logit_softcapping": 30.0,
}  # fmt: skip
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
LFM2_350M: Config = {
    "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_dim": 1024, "block_ff_dim": 6656,
    "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5,
    "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "bos_token_id": 1,
    "conv_L_cache": 3, "conv_bias": False, "conv_dim": 1024, "conv_dim_out": 1024, "conv_use_xavier_init": True,
    "eos_token_id": 7, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 1024, "initializer_range": 0.02,
    "max_position_embeddings": 128000, "norm_eps": 1e-5, "num_attention_heads": 16, "num_heads": 16,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16", "transformers_version": "4.54.0", "use_cache": True, "use_pos_enc": True,
    "vocab_size": 65536,
}  # fmt: skip
QWEN_35_SMALL: Config = {  # the text model inside
    "model_type": "qwen3_5_text", "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
    "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 1024,
    "initializer_range": 0.02, "intermediate_size": 3584, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6, "max_position_embeddings": 262144,
    "mlp_only_layers": [], "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 8, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "use_cache": True, "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
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
PER_LAYER: Config = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 4, "num_kv_shared_layers": 2}
DELTA_RULE: Config = {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
TINY: dict[str, Config] = {
    "llama": {"model_type": "llama"},
    "llama, every bias, tied": {
        "model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
    },
    "llama, a head of its own size": {"model_type": "llama", "head_dim": 6, "num_key_value_heads": 4},
    "mistral": {"model_type": "mistral", "sliding_window": 16},
    "mistral, window not written": {"model_type": "mistral", "max_position_embeddings": 8192},
    "mistral, no window": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen2, last layers windowed": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 4,
    },
    "qwen2, window by layer": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "qwen2, window switched off": {
        "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 16, "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3, biases and windows": {
        "model_type": "qwen3", "attention_bias": True, "use_sliding_window": True, "sliding_window": 16,
        "max_window_layers": 3,
    },
    "smollm3": {"model_type": "smollm3"},
    "smollm3, marked layers and windows": {
        "model_type": "smollm3", "no_rope_layers": [1, 0, 1, 1, 0, 1], "use_sliding_window": True,
        "sliding_window": 16, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
    },
    "phi3": {"model_type": "phi3", "sliding_window": 16},
    "phi3, partly turned, longrope": {
        "model_type": "phi3", "partial_rotary_factor": 0.5, "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]},
    },
    "gemma2": {"model_type": "gemma2", "sliding_window": 16},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 16, "num_hidden_layers": 8},
    "gemma3, scaled": {
        "model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 2, "attention_bias": True,
        "rope_theta": 5e5, "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": False,
    },
    "granite": {
        "model_type": "granite", "embedding_multiplier": 12.0, "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22, "logits_scaling": 8.0,
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo3, scaled": {
        "model_type": "olmo3", "sliding_window": 16, "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "exaone4": {"model_type": "exaone4", "sliding_window": 16},
    "exaone4, no window": {
        "model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 6,
        "tie_word_embeddings": True,
    },
    "ernie4_5": {"model_type": "ernie4_5", "use_bias": True},
    "hunyuan": {
        "model_type": "hunyuan_v1_dense", "head_dim": 8, "attention_head_dim": 8, "use_qk_norm": True,
        "use_cla": False, "tie_word_embeddings": True,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1},
    },
    "hunyuan, plain rope, biases": {"model_type": "hunyuan_v1_dense", "head_dim": 12, "attention_bias": True},
    "ministral3": {
        "model_type": "ministral3",
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "lfm2": {"model_type": "lfm2", "full_attn_idxs": [2, 4], "block_multiple_of": 16},
    "lfm2, by layer, with biases": {
        "model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 3, "conv_bias": True, "conv_L_cache": 4,
        "block_auto_adjust_ff_dim": False, "tie_embedding": False,
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text", **DELTA_RULE, "linear_num_value_heads": 4, "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "qwen3_5, by layer, with biases": {
        "model_type": "qwen3_5_text", **DELTA_RULE, "layer_types": ["linear_attention", "full_attention"] * 3,
        "linear_num_value_heads": 2, "attention_bias": True, "linear_conv_kernel_dim": 3, "head_dim": 8,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe", "layer_types": ["conv", "full_attention"] * 3, "num_dense_layers": 2,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "tie_embedding": True,
        "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "gpt_oss, by layer, without biases of attention": {
        "model_type": "gpt_oss", "num_local_experts": 4, "sliding_window": 16, "attention_bias": False,
        "layer_types": ["full_attention", "sliding_attention"] * 3, "swiglu_limit": 2.0, "swiglu_alpha": 1.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "decoder_sparse_step": 2, "mlp_only_layers": [3],
    },
    "gemma3n": {
        "model_type": "gemma3n_text", **PER_LAYER, "laurel_rank": 4, "sliding_window": 16,
        "intermediate_size": [48, 32, 48, 32, 48, 32], "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "gemma4": {
        "model_type": "gemma4_text", **PER_LAYER, "global_head_dim": 16, "use_double_wide_mlp": True,
        "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "gemma4, heads of one size": {
        "model_type": "gemma4_text", **PER_LAYER, "global_head_dim": 8, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 3, "tie_word_embeddings": False,
    },
    "gemma4, experts": {
        "model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "global_head_dim": 16,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": 8, "sliding_window": 16,
    },
}  # fmt: skip
TINY = {name: SMALL | config for name, config in TINY.items()}


def write_config(folder: Path, config: Config) -> Path:
    """A model folder that holds a config and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
