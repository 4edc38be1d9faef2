"""Config fields that no family needs to read. Any other unread field is refused.

An unknown field could mean a different model with the same weights.
"""

from __future__ import annotations

from edgekit.model.families.fields import Fields


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Fields for training, generation with transformers, and bookkeeping, which do not change logits.
_UNUSED = _words(
    """
    _attn_implementation_autoset _name_or_path architectures attention_dropout attention_probs_dropout_prob
    attn_implementation auto_map cache_implementation chunk_size_feed_forward classifier_dropout classifier_from_token
    decoder_start_token_id dtype embd_pdrop finetuning_task gradient_checkpointing hidden_dropout_prob id2label
    initializer_range is_llama_config is_matryoshka is_original_qwen3_reranker label2id mask_token_id
    matryoshka_dimensions max_sequence_length model_type name output_attentions output_hidden_states
    output_router_logits pad_token_id prefix pretraining_tp problem_type resid_pdrop return_dict router_aux_loss_coef
    router_jitter_noise sep_token_id task_specific_params tf_legacy_loss tokenizer_class torch_dtype torchscript
    transformers.js_config transformers_version unsloth_fixed unsloth_fixed_mtp unsloth_version use_auth_token
    use_bfloat16 use_cache use_return_dict

    compression_config quantization quantization_config

    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens
    min_length min_p no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores
    remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
    """
)
# Switches of optional parts, ignored if the part is absent.
_ABSENT: dict[str, object] = {
    "add_cross_attention": False, "compression_ratio": 1.0, "is_decoder": False, "is_encoder_decoder": False,
    "lm_head_bias": False, "pruned_heads": {}, "rope_interleaved": False, "tie_encoder_decoder": False,
    "use_bidirectional_attention": False, "use_mrope": False, "use_sliding_window": False,
}  # fmt: skip
# Fields of some families that no reader needs.
_GEMMA = ("_sliding_window_pattern", "hidden_act")
_BERT = (
    "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
    "pooler_type",
)  # fmt: skip
_OF_FAMILY: dict[str, tuple[str, ...]] = {
    "bert": _BERT,
    "exaone4": ("sliding_window_pattern",),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma3n_text": (
        *_GEMMA, "activation_sparsity_pattern", "altup_active_idx", "altup_coef_clip", "altup_correct_scale",
        "altup_lr_multiplier",
    ),
    "gemma4_text": (*_GEMMA, "num_experts", "top_k_experts", "moe_intermediate_size"),
    "hunyuan_v1_dense": (
        "cla_share_factor", "class_num", "dense_list", "eod_token_id", "im_end_id", "im_newline_id", "im_start_id",
        "mask_init_id", "norm_type", "org_vocab_size", "pad_id", "pool_type", "text_end_id", "text_start_id",
    ),
    "lfm2": (
        "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init",
        "block_multiple_of", "block_ffn_dim_multiplier", "full_attn_idxs",
    ),
    "phi3": ("full_attn_mod", "interpolate_factor", "original_max_position_embeddings"),
    "qwen3_5_text": ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    "qwen3_moe": ("max_window_layers",),
    "smollm3": ("max_window_layers",),
}  # fmt: skip
# Fields of all kinds of ropes; only the fields of the stated kind have an effect.
_OF_ROPES = _words(
    """
    attention_factor beta_fast beta_slow factor finetuned high_freq_factor long_factor long_mscale low_freq_factor
    max_position_embeddings mscale mscale_all_dim original_max_position_embeddings partial_rotary_factor rope_theta
    rope_type short_factor short_mscale truncate type
    """
)
# Fields of a multimodal model outside its text model.
_BESIDE_TEXT = _words(
    """
    audio_config audio_soft_tokens_per_image audio_token_id boa_token_id boi_token_id boi_token_index eoa_token_id
    eoa_token_index eoi_token_id eoi_token_index image_token_id image_token_index mm_tokens_per_image
    multimodal_projector_bias projector_hidden_act spatial_merge_size video_token_id vision_config vision_end_token_id
    vision_feature_layer vision_soft_tokens_per_image vision_start_token_id
    """
)


def refuse_unknown(fields: Fields, family: str, text: str | None = None) -> None:
    """Raise Unsupported for a field that was not read, unless it changes nothing.

    `text` is the family of the text model inside a multimodal one.
    """
    inner = fields.section("text_config") if text is not None else None
    for place, key in fields.unread():
        if place is fields and inner is not None:
            known = _UNUSED | _BESIDE_TEXT
        elif place in (fields, inner):
            known = _UNUSED.union(_OF_FAMILY.get(text or family, ()))
        else:
            known = _OF_ROPES
        if key not in known and not _is_absent(key, place.get(key)):
            raise place.unsupported(
                key, f"is not a known field of {text or family} and could mean a different model; correct the file"
            )


def _is_absent(key: str, value: object) -> bool:
    """Return True if a field says that its part is absent."""
    if key == "layer_types":
        return isinstance(value, list) and all(kind == "full_attention" for kind in value)
    return key in _ABSENT and value == _ABSENT[key]
