"""The `config.json` for MLX's loaders: the model's own, with both spellings of rope fields, and `quantization`.

mlx-lm reads some fields only at the top level and silently falls back to a default where one is missing, so every
field that it may look for is written from the specification.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edgekit.model.parts import Layer, Rope
from edgekit.model.spec import ModelSpec
from edgekit_mlx.layout import MlxPacking

_DROPPED = ("quantization_config", "compression_config", "auto_map", "model_file", "quantization")


def mlx_config(
    source: Mapping[str, Any], model: ModelSpec, packed: Mapping[str, MlxPacking | None], floats: str
) -> dict[str, Any]:
    """Return the config of the exported folder."""
    config = {key: value for key, value in source.items() if key not in _DROPPED}
    config |= _shapes(model) | _positions(model, source)
    config["dtype"] = config["torch_dtype"] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[floats]
    quantization = quantization_of(packed)
    if quantization and model.family == "qwen3_5_text":  # mlx-lm names modules as the wrapped model does
        quantization |= {f"language_model.{key}": rule for key, rule in quantization.items() if key in packed}
    return config | ({"quantization": quantization} if quantization else {})


def quantization_of(packed: Mapping[str, MlxPacking | None]) -> dict[str, Any] | None:
    """Return the most common packing, and the packing of each module that differs; `false` for float modules."""
    counts: dict[MlxPacking, int] = {}
    for packing in packed.values():
        if packing is not None:
            counts[packing] = counts.get(packing, 0) + 1
    if not counts:
        return None
    common = max(counts, key=lambda packing: counts[packing])
    config = common.config()
    for module, packing in packed.items():
        if packing != common:
            config[module] = packing.config() if packing is not None else False
    return config


def _shapes(model: ModelSpec) -> dict[str, Any]:
    """Return fields for which mlx-lm would otherwise use its own defaults."""
    kinds = [_kind(layer) for layer in model.layers]
    return {
        **_experts(model),
        # mlx-lm's Llama class, which also runs Mistral, fails if every layer has a window.
        "layer_types": kinds if set(kinds) != {"sliding_attention"} or model.family == "gemma3_text" else None,
        "model_type": model.family,
        "head_dim": model.head_dim,
        "num_key_value_heads": model.kv_heads,
        "tie_word_embeddings": model.tied,
        "rms_norm_eps": model.norm_epsilon,
        "max_position_embeddings": model.max_positions,
        **_shapes_of_family(model),
    }


def _shapes_of_family(model: ModelSpec) -> dict[str, Any]:
    """Return the fields that one class of mlx-lm reads."""
    match model.family:
        case "gemma4_text":  # the shapes of global layers
            full = next((layer for layer in model.layers if layer.window is None), model.layers[0])
            return {"global_head_dim": full.head_dim, "num_global_key_value_heads": full.kv_heads}
        case "cohere2":
            return {"sliding_window_pattern": window_pattern(model)}
        case "exaone4":  # windows are letters: L for a layer with a window, G for one without
            letters = "".join("G" if layer.window is None else "L" for layer in model.layers)
            return {"sliding_window_pattern": letters if "L" in letters else None}
        case "lfm2" | "lfm2_moe":
            # mlx-lm's lfm2 takes two thirds of the feed-forward size and rounds up, unless it is told not to.
            return {
                "full_attn_idxs": list(model.storing_layers),
                "block_dim": model.hidden_size,
                "block_ff_dim": model.intermediate_size,
                "intermediate_size": model.intermediate_size,
                "block_auto_adjust_ff_dim": False,
                "block_multiple_of": 1,
                "block_ffn_dim_multiplier": 1.0,
                "norm_eps": model.norm_epsilon,
                "conv_bias": model.conv_bias,
                "conv_L_cache": max(layer.conv_taps or 0 for layer in model.layers),
                **_hybrid_experts(model),
            }
        case "qwen3_5_text":  # it has one class for the text model and the wrapped one
            return {"model_type": "qwen3_5", "full_attention_interval": _attention_interval(model)}
    return {}


def _kind(layer: Layer) -> str:
    """Return the kind of a layer as `layer_types` name it."""
    if layer.is_recurrent:
        return "conv" if layer.conv_taps else "linear_attention"
    return "full_attention" if layer.window is None else "sliding_attention"


def _experts(model: ModelSpec) -> dict[str, Any]:
    """Return the fields of a mixture, which transformers spells in another way for some families."""
    experts = model.experts
    if experts is None:
        return {}
    if model.family in ("mixtral", "gpt_oss"):
        return {"num_local_experts": experts.count, "num_experts_per_tok": experts.active}
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalise,
        "mlp_only_layers": [index for index, layer in enumerate(model.layers) if not layer.experts],
        "decoder_sparse_step": 1,
    }


def _hybrid_experts(model: ModelSpec) -> dict[str, Any]:
    """Return the fields of a mixture that only LFM2-MoE has."""
    if model.experts is None:
        return {}
    return {
        "num_dense_layers": sum(not layer.experts for layer in model.layers),
        "use_expert_bias": model.experts.biased,
        "routed_scaling_factor": 1.0,
    }


def _positions(model: ModelSpec, source: Mapping[str, Any]) -> dict[str, Any]:
    if model.family == "gemma3_text":
        full, sliding = model.ropes["full"], model.ropes["sliding"]
        fields: dict[str, Any] = {
            "rope_theta": full.theta,
            "rope_local_base_freq": sliding.theta,
            "sliding_window_pattern": window_pattern(model),
            "rope_parameters": {
                "full_attention": {"rope_theta": full.theta, **_scaling(full)},
                "sliding_attention": {"rope_theta": sliding.theta, **_scaling(sliding)},
            },
        }
        return fields | {"rope_scaling": _scaling(full) if full.kind != "default" else None}
    if len(model.ropes) == 2:
        return {
            "rope_theta": model.ropes["full"].theta,
            "rope_parameters": {
                f"{kind}_attention": {"rope_theta": rope.theta, **_scaling(rope)} for kind, rope in model.ropes.items()
            },
        }
    rope = next(iter(model.ropes.values()))
    scaling = _scaling(rope)
    fields = {
        "rope_theta": rope.theta,
        "rope_scaling": {"type": scaling["rope_type"], **scaling} if rope.kind != "default" else None,
        "rope_parameters": {"rope_theta": rope.theta, **scaling},
    }
    if model.family == "ministral3":  # required by mlx-lm; it is 1 within the planned context
        beta = (source.get("rope_parameters") or source.get("rope_scaling") or {}).get("llama_4_scaling_beta", 0.0)
        fields["rope_parameters"]["llama_4_scaling_beta"] = beta
    if model.family in ("phi3", "qwen3_5_text", "glm4"):
        share = rope.dim / model.head_dim
        fields["partial_rotary_factor"] = share
        fields["rope_parameters"]["partial_rotary_factor"] = share
        if model.family == "phi3" and rope.original_positions is not None:
            fields["original_max_position_embeddings"] = rope.original_positions
    return fields


def _scaling(rope: Rope) -> dict[str, Any]:
    """Return a rope's scaling under transformers' names."""
    fields: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind == "default":
        return fields
    if rope.kind != "longrope":
        fields["factor"] = rope.factor
    if rope.kind == "proportional":
        fields["partial_rotary_factor"] = rope.proportion
    if rope.kind in ("llama3", "yarn", "longrope"):
        fields["original_max_position_embeddings"] = rope.original_positions
    if rope.kind == "longrope":
        fields |= {
            "factor": rope.factor,
            "short_factor": list(rope.short_factor),
            "long_factor": list(rope.long_factor),
        }
    optional = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
    for name in (*optional, "mscale", "mscale_all_dim"):
        if getattr(rope, name) is not None:
            fields[name] = getattr(rope, name)
    if rope.kind == "yarn" and not rope.truncate:
        fields["truncate"] = False
    return fields


def window_pattern(model: ModelSpec) -> int:
    """Return the period of layers without a window, as Gemma 3 counts it."""
    full = [index for index, layer in enumerate(model.layers) if layer.window is None]
    return full[0] + 1 if full else len(model.layers) + 1


def _attention_interval(model: ModelSpec) -> int:
    """Return the period of layers with attention, as Qwen3.5 counts it."""
    return next(index for index, layer in enumerate(model.layers) if layer.stores_kv) + 1


def differences(model: ModelSpec, context: int) -> list[str]:
    """Return each way in which mlx-lm would compute this model wrongly within `context` tokens.

    This target's engine computes the model as specified; these are notes for users of mlx-lm.
    """
    notes = []
    windows = {layer.window for layer in model.layers if layer.window is not None and layer.window < context}
    honours = model.family in ("llama", "smollm3") and any(layer.window is None for layer in model.layers)
    if windows and not honours and model.family not in ("gemma3_text", "gemma4_text", "gpt_oss", "cohere2"):
        notes.append(f"mlx-lm's {model.family} ignores the window of {min(windows)} tokens that the model declares")
    if model.family == "arcee":
        notes.append("mlx-lm has no class for arcee, so it cannot load this folder")
    if model.family == "glm" and any(rope.dim < model.head_dim for rope in model.ropes.values()):
        notes.append("mlx-lm's glm rotates whole heads, and this model a part of each")
    if model.family in ("gemma3_text", "cohere2"):
        pattern = window_pattern(model)
        periodic = [index % pattern != pattern - 1 for index in range(len(model.layers))]
        if windows and periodic != [layer.window is not None for layer in model.layers]:
            notes.append("mlx-lm knows only windows that repeat every few layers, and this model's do not")
    if model.family == "qwen3_5_text":
        interval = _attention_interval(model)
        if any(layer.stores_kv != ((index + 1) % interval == 0) for index, layer in enumerate(model.layers)):
            notes.append("mlx-lm knows only attention that repeats every few layers, and this model's does not")
    if model.family in ("lfm2", "lfm2_moe") and not model.tied:
        notes.append(f"mlx-lm's {model.family} has no head of its own, and this model's is not its embedding")
    notes += _differences_of_gpt_oss(model)
    for rope in model.ropes.values():
        if model.family in ("lfm2", "lfm2_moe") and rope.kind != "default":
            notes.append(f"mlx-lm's {model.family} ignores the {rope.kind} scaling of the rope")
        if rope.kind == "dynamic":
            notes.append("mlx-lm stretches a dynamic rope as the text grows, after older keys were rotated")
        if rope.kind == "longrope" and rope.original_positions and context <= rope.original_positions:
            notes.append("mlx-lm takes the long factors of longrope for every context")
        if rope.kind == "yarn" and rope.attention_factor is not None:
            notes.append("mlx-lm ignores attention_factor of a yarn rope")
        if rope.kind == "yarn" and not rope.truncate:
            notes.append("mlx-lm rounds the range that a yarn rope interpolates to whole channels")
    return notes


def _differences_of_gpt_oss(model: ModelSpec) -> Iterator[str]:
    swiglu = model.experts.swiglu if model.experts else None
    if model.family != "gpt_oss" or swiglu is None:
        return
    if (swiglu.alpha, swiglu.limit) != (1.702, 7.0):
        yield "mlx-lm's gpt_oss knows only a swiglu_alpha of 1.702 and a swiglu_limit of 7"
    if model.tied:
        yield "mlx-lm's gpt_oss has a head of its own, and this model's is its embedding"
    if not model.qkv_bias:
        yield "mlx-lm's gpt_oss has biases in its attention, and this model has none"
    if len({layer.window is None for layer in model.layers}) == 1:
        yield "mlx-lm's gpt_oss needs layers with a window and layers without"
