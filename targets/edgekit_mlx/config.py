"""The `config.json` for MLX's loaders: the model's own, with both spellings of rope fields, and `quantization`.

mlx-lm reads some fields only at the top level and silently falls back to a default where one is missing, so every
field that it may look for is written from the specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgekit.model.parts import Rope
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
    return config | ({"quantization": quantization} if quantization else {})


def quantization_of(packed: Mapping[str, MlxPacking | None]) -> dict[str, Any] | None:
    """Return the most common packing, and by name each module that differs; `false` for float modules."""
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
    windowed = [layer.window is not None for layer in model.layers]
    kinds = ["sliding_attention" if each else "full_attention" for each in windowed]
    # mlx-lm reads EXAONE's windows only from these letters: L for a layer with a window, G for one without.
    letters = "".join("L" if each else "G" for each in windowed) if any(windowed) else None
    # mlx-lm reads the shapes of Gemma 4's global layers only from these fields.
    full = next((layer for layer in model.layers if layer.window is None), model.layers[0])
    of_global = {"global_head_dim": full.head_dim, "num_global_key_value_heads": full.kv_heads}
    return {
        **_experts(model),
        **(of_global if model.family == "gemma4_text" else {}),
        **({"sliding_window_pattern": letters} if model.family == "exaone4" else {}),
        # mlx-lm's Llama class, which also runs Mistral, fails if every layer has a window.
        "layer_types": kinds if not all(windowed) or model.family == "gemma3_text" else None,
        "model_type": model.family,
        "head_dim": model.head_dim,
        "num_key_value_heads": model.kv_heads,
        "tie_word_embeddings": model.tied,
        "rms_norm_eps": model.norm_epsilon,
        "max_position_embeddings": model.max_positions,
    }


def _experts(model: ModelSpec) -> dict[str, Any]:
    """Return the fields of a mixture, which transformers spells in another way for some families."""
    experts = model.experts
    if experts is None:
        return {}
    if model.family == "mixtral":
        return {"num_local_experts": experts.count, "num_experts_per_tok": experts.active}
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalise,
        "mlp_only_layers": [index for index, layer in enumerate(model.layers) if not layer.experts],
        "decoder_sparse_step": 1,
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
    if model.family == "phi3":
        share = rope.dim / model.head_dim
        fields["partial_rotary_factor"] = share
        fields["rope_parameters"]["partial_rotary_factor"] = share
        if rope.original_positions is not None:
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


def differences(model: ModelSpec, context: int) -> list[str]:
    """Return each way in which mlx-lm would compute this model wrongly within `context` tokens.

    This target's engine computes the model as specified; these are notes for users of mlx-lm.
    """
    notes = []
    windows = {layer.window for layer in model.layers if layer.window is not None and layer.window < context}
    honours = model.family in ("llama", "smollm3") and any(layer.window is None for layer in model.layers)
    if windows and not honours and model.family not in ("gemma3_text", "gemma4_text"):
        notes.append(f"mlx-lm's {model.family} ignores the window of {min(windows)} tokens that the model declares")
    if model.family == "gemma3_text":
        pattern = window_pattern(model)
        periodic = [index % pattern != pattern - 1 for index in range(len(model.layers))]
        if windows and periodic != [layer.window is not None for layer in model.layers]:
            notes.append("mlx-lm knows only windows that repeat every few layers, and this model's do not")
    for rope in model.ropes.values():
        if rope.kind == "dynamic":
            notes.append("mlx-lm stretches a dynamic rope as the text grows, after older keys were rotated")
        if rope.kind == "longrope" and rope.original_positions and context <= rope.original_positions:
            notes.append("mlx-lm takes the long factors of longrope for every context")
        if rope.kind == "yarn" and rope.attention_factor is not None:
            notes.append("mlx-lm ignores attention_factor of a yarn rope")
    return notes
