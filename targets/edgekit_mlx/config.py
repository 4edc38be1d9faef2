"""The `config.json` that MLX's loaders read: the model's own, with both spellings of positions, and `quantization`.

mlx-lm reads some fields only at the top level and falls back to a default without a word where one is missing, so
everything that it could look for is written from the specification. Pure data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgekit.model import ModelSpec, Rope
from edgekit_mlx.layout import Packing

_DROPPED = ("quantization_config", "compression_config", "auto_map", "model_file", "quantization")


def mlx_config(
    source: Mapping[str, Any], model: ModelSpec, packed: Mapping[str, Packing | None], floats: str
) -> dict[str, Any]:
    """The config of the exported folder."""
    config = {key: value for key, value in source.items() if key not in _DROPPED}
    config |= _shapes(model) | _positions(model, source)
    config["dtype"] = config["torch_dtype"] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[floats]
    quantization = quantization_of(packed)
    return config | ({"quantization": quantization} if quantization else {})


def quantization_of(packed: Mapping[str, Packing | None]) -> dict[str, Any] | None:
    """The commonest packing for all, and every module that differs by name; `false` where one is float."""
    counts: dict[Packing, int] = {}
    for packing in packed.values():
        if packing is not None:
            counts[packing] = counts.get(packing, 0) + 1
    if not counts:
        return None
    common = max(counts, key=lambda packing: counts[packing])
    found = common.config()
    for module, packing in packed.items():
        if packing != common:
            found[module] = packing.config() if packing is not None else False
    return found


def _shapes(model: ModelSpec) -> dict[str, Any]:
    """What mlx-lm's classes would guess, each by a default of its own."""
    windowed = [layer.window is not None for layer in model.layers]
    kinds = ["sliding_attention" if each else "full_attention" for each in windowed]
    return {
        # Its Llama, which also runs Mistral, fails where no layer sees everything.
        "layer_types": kinds if not all(windowed) or model.family == "gemma3_text" else None,
        "model_type": model.family,
        "head_dim": model.head_dim,
        "num_key_value_heads": model.kv_heads,
        "tie_word_embeddings": model.tied,
        "rms_norm_eps": model.norm_epsilon,
        "max_position_embeddings": model.max_positions,
    }


def _positions(model: ModelSpec, source: Mapping[str, Any]) -> dict[str, Any]:
    if model.family == "gemma3_text":
        full, sliding = model.ropes["full"], model.ropes["sliding"]
        found: dict[str, Any] = {
            "rope_theta": full.theta,
            "rope_local_base_freq": sliding.theta,
            "sliding_window_pattern": window_pattern(model),
            "rope_parameters": {
                "full_attention": {"rope_theta": full.theta, **_scaling(full)},
                "sliding_attention": {"rope_theta": sliding.theta, **_scaling(sliding)},
            },
        }
        return found | {"rope_scaling": _scaling(full) if full.kind != "default" else None}
    rope = next(iter(model.ropes.values()))
    scaling = _scaling(rope)
    found = {
        "rope_theta": rope.theta,
        "rope_scaling": {"type": scaling["rope_type"], **scaling} if rope.kind != "default" else None,
        "rope_parameters": {"rope_theta": rope.theta, **scaling},
    }
    if model.family == "phi3":
        share = rope.dim / model.head_dim
        found["partial_rotary_factor"] = share
        found["rope_parameters"]["partial_rotary_factor"] = share
        if rope.original_positions is not None:
            found["original_max_position_embeddings"] = rope.original_positions
    return found


def _scaling(rope: Rope) -> dict[str, Any]:
    """How a rope is stretched, in transformers' words."""
    found: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind == "default":
        return found
    if rope.kind != "longrope":
        found["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn", "longrope"):
        found["original_max_position_embeddings"] = rope.original_positions
    if rope.kind == "longrope":
        found |= {"factor": rope.factor, "short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
    optional = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
    for name in (*optional, "mscale", "mscale_all_dim"):
        if getattr(rope, name) is not None:
            found[name] = getattr(rope, name)
    if rope.kind == "yarn" and not rope.truncate:
        found["truncate"] = False
    return found


def window_pattern(model: ModelSpec) -> int:
    """Every how many layers one sees everything, as Gemma 3 counts."""
    seeing = [index for index, layer in enumerate(model.layers) if layer.window is None]
    return seeing[0] + 1 if seeing else len(model.layers) + 1


def differences(model: ModelSpec, context: int) -> list[str]:
    """Where mlx-lm's own classes, opening the same folder, would compute something else within `context` tokens.

    The engine of this target computes what the model says; these are for those who load the folder with mlx-lm.
    """
    found = []
    windows = {layer.window for layer in model.layers if layer.window is not None and layer.window < context}
    honours = model.family in ("llama", "smollm3") and any(layer.window is None for layer in model.layers)
    if windows and not honours and model.family != "gemma3_text":
        found.append(f"mlx-lm's {model.family} ignores the window of {min(windows)} tokens that the model declares")
    if model.family == "gemma3_text":
        pattern = window_pattern(model)
        periodic = [index % pattern != pattern - 1 for index in range(len(model.layers))]
        if windows and periodic != [layer.window is not None for layer in model.layers]:
            found.append("mlx-lm knows only windows that repeat every few layers, and this model's do not")
    for rope in model.ropes.values():
        if rope.kind == "dynamic":
            found.append("mlx-lm stretches a dynamic rope as the text grows, past keys that are already turned")
        if rope.kind == "longrope" and rope.original_positions and context <= rope.original_positions:
            found.append("mlx-lm takes the long factors of longrope for every context")
        if rope.kind == "yarn" and rope.attention_factor is not None:
            found.append("mlx-lm ignores attention_factor of a yarn rope")
    return found
