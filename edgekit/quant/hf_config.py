"""The `config.json` of neutral weights: the model's own, readable by old and new loaders.

Rotary positions are written in both spellings, because some loaders read only one and silently fall back to a default.
`quantization_config` describes the format of each module for compressed-tensors. Pure data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgekit.contracts.neutral import is_module, on_disk
from edgekit.contracts.recipe import INTEGER_BITS, Format, Recipe
from edgekit.model.spec import ModelSpec

_DROPPED = ("auto_map", "quantization_config", "compression_config")  # code, and quantisation by other tools


_OUTER = ("eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
_TEXT_CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}


def neutral_config(source: Mapping[str, Any], model: ModelSpec, recipe: Recipe) -> dict[str, Any]:
    """Return the config of neutral weights of a source model, always as a text model."""
    text = source.get("text_config")
    if isinstance(text, dict):
        outer = {key: source[key] for key in _OUTER if key in source}
        source = text | outer | {"model_type": model.family, "architectures": [_TEXT_CLASSES[model.family]]}
    config = {key: value for key, value in source.items() if key not in _DROPPED}
    config |= both_rope_spellings(config)
    if recipe.float_format.kind == "float16":
        # Servers take bfloat16 for float32, which is coarser than what is stored.
        config |= {key: "float16" for key in ("dtype", "torch_dtype") if config.get(key) == "float32"}
    quantisation = quantization_config(model, recipe)
    return config | ({"quantization_config": quantisation} if quantisation else {})


def both_rope_spellings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling`, the older spelling of `rope_parameters`, where they are missing."""
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict):
        return {}
    spellings: dict[str, Any] = {}
    by_layer = {key: value for key, value in parameters.items() if isinstance(value, dict)}
    whole = by_layer.get("full_attention", parameters)
    if whole.get("rope_type") == "proportional":  # younger than the older spelling
        return {}
    if "rope_theta" in whole:
        spellings["rope_theta"] = whole["rope_theta"]
    if "rope_theta" in by_layer.get("sliding_attention", {}):
        spellings["rope_local_base_freq"] = by_layer["sliding_attention"]["rope_theta"]
    if whole.get("rope_type", "default") != "default":
        spellings["rope_scaling"] = {key: value for key, value in whole.items() if key != "rope_theta"}
    return {key: value for key, value in spellings.items() if key not in config}


def quantization_config(model: ModelSpec, recipe: Recipe) -> dict[str, Any] | None:
    """Return the config for compressed-tensors; None if everything is float.

    The most common format of the linears is the rule for `Linear`; every other quantised module is named.
    """
    formats: dict[str, Format] = {}
    linears: list[str] = []
    for tensor in model.tensors():
        if is_module(tensor) and len(tensor.shape) == 2:
            module = on_disk(model, tensor.name).removesuffix(".weight")
            formats[module] = recipe.format_of(tensor)
            if tensor.is_linear:
                linears.append(module)
    quantised = {module: stored for module, stored in formats.items() if not stored.is_float}
    if not quantised:
        return None
    counts: dict[str, int] = {}
    for module in linears:
        if module in quantised:
            counts[str(formats[module])] = counts.get(str(formats[module]), 0) + 1
    common = max(counts, key=lambda name: counts[name], default=None)
    # compressed-tensors takes the first target that matches, so the general rule comes last.
    groups: dict[str, dict[str, Any]] = {}
    for module, stored in sorted(quantised.items(), key=lambda item: str(item[1]) == common):
        group = groups.setdefault(str(stored), {"targets": [], **_arguments(stored)})
        if not (module in linears and str(stored) == common):
            group["targets"].append(module)
    if common is not None:
        groups[common]["targets"].append("Linear")
    ignored = [module for module, stored in formats.items() if stored.is_float]
    ignored += [on_disk(model, tensor.module) for tensor in model.tensors() if tensor.role == "router"]
    if "lm_head" not in quantised and "lm_head" not in ignored:
        ignored.append("lm_head")  # loaders see a tied head as a Linear without stored weights
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ignored,
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups.values())},
    }


def _arguments(stored: Format) -> dict[str, Any]:
    """Return the arguments of the weights of one format."""
    grouped = {"strategy": "channel"} if stored.group is None else {"strategy": "group", "group_size": stored.group}
    return {
        "weights": {"num_bits": INTEGER_BITS[stored.kind], "type": "int", "symmetric": True, "dynamic": False} | grouped
    }
