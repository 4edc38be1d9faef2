"""The `config.json` that stands beside neutral weights: the model's own, readable by old and new loaders alike.

Rotary positions are written in both spellings (some loaders read only one and fall back to a default without a word),
and `quantization_config` tells compressed-tensors how each module is stored. Pure data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgekit.model import ModelSpec
from edgekit.recipe import Format, Recipe
from edgekit.weights.neutral import on_disk

_DROPPED = ("auto_map", "quantization_config", "compression_config")  # no code, and no other's quantisation


_OUTER = ("eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
_TEXT_CLASSES = {"gemma3_text": "Gemma3ForCausalLM"}


def neutral_config(source: Mapping[str, Any], model: ModelSpec, recipe: Recipe) -> dict[str, Any]:
    """The config of a source model, as it stands beside its neutral weights: always that of a text model."""
    text = source.get("text_config")
    if isinstance(text, dict):
        outer = {key: source[key] for key in _OUTER if key in source}
        source = text | outer | {"model_type": model.family, "architectures": [_TEXT_CLASSES[model.family]]}
    config = {key: value for key, value in source.items() if key not in _DROPPED}
    config |= both_rope_spellings(config)
    quantisation = quantization_config(model, recipe)
    return config | ({"quantization_config": quantisation} if quantisation else {})


def both_rope_spellings(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` as transformers 5 writes it, and `rope_theta` and `rope_scaling` as everybody wrote before."""
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict):
        return {}
    found: dict[str, Any] = {}
    by_layer = {key: value for key, value in parameters.items() if isinstance(value, dict)}
    whole = by_layer.get("full_attention", parameters)
    if "rope_theta" in whole:
        found["rope_theta"] = whole["rope_theta"]
    if "rope_theta" in by_layer.get("sliding_attention", {}):
        found["rope_local_base_freq"] = by_layer["sliding_attention"]["rope_theta"]
    if whole.get("rope_type", "default") != "default":
        found["rope_scaling"] = {key: value for key, value in whole.items() if key != "rope_theta"}
    return {key: value for key, value in found.items() if key not in config}


def quantization_config(model: ModelSpec, recipe: Recipe) -> dict[str, Any] | None:
    """What compressed-tensors needs to know; None where everything is float.

    The commonest format of the linears is the rule for `Linear`; every other quantised module is named.
    """
    formats: dict[str, Format] = {}
    linears: list[str] = []
    for tensor in model.tensors():
        if tensor.role in ("embedding", "head", "linear") and len(tensor.shape) == 2:
            module = on_disk(model, tensor.name).removesuffix(".weight")
            formats[module] = recipe.format_of(tensor)
            if tensor.role == "linear":
                linears.append(module)
    quantised = {module: stored for module, stored in formats.items() if not stored.is_float}
    if not quantised:
        return None
    counts: dict[str, int] = {}
    for module in linears:
        if module in quantised:
            counts[str(formats[module])] = counts.get(str(formats[module]), 0) + 1
    common = max(counts, key=lambda name: counts[name], default=None)
    # compressed-tensors takes the first target that matches, so the rule for all the rest stands last.
    groups: dict[str, dict[str, Any]] = {}
    for module, stored in sorted(quantised.items(), key=lambda item: str(item[1]) == common):
        group = groups.setdefault(str(stored), {"targets": [], "weights": _arguments(stored)})
        if not (module in linears and str(stored) == common):
            group["targets"].append(module)
    if common is not None:
        groups[common]["targets"].append("Linear")
    ignored = [module for module, stored in formats.items() if stored.is_float]
    if "lm_head" not in quantised and "lm_head" not in ignored:
        ignored.append("lm_head")  # a tied head is a Linear that stores nothing
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ignored,
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups.values())},
    }


def _arguments(stored: Format) -> dict[str, Any]:
    common = {"num_bits": 4 if stored.kind == "s4" else 8, "type": "int", "symmetric": True, "dynamic": False}
    if stored.group is None:
        return common | {"strategy": "channel"}
    return common | {"strategy": "group", "group_size": stored.group}
