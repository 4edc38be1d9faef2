"""Reads the configs of EAGLE-3 heads in both published layouts.

`LlamaForCausalLMEagle3` calls the layer `midlayer`; vLLM's `speculators` nests its sizes and calls it `layers.0`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgekit.errors import InvalidInput, Unsupported, quote_short
from edgekit.model.families import model_from_config
from edgekit.model.head_spec import LAYER, HeadConfig
from edgekit.model.spec import ModelSpec

LEGACY = "LlamaForCausalLMEagle3"
# Defaults of transformers' classes, which `speculators` omits from a layer's sizes.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    },
    "qwen3": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32,
        "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    },
}  # fmt: skip
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Tensors that duplicate the target's, or follow from the config.
_UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight", f"{LAYER}self_attn.rotary_emb.inv_freq")
_READ_HERE = ("layer_types", "sliding_window", "max_window_layers", "use_sliding_window")
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def read_eagle3(config: dict[str, Any], place: Path, target: ModelSpec) -> HeadConfig:
    """Read the config of an EAGLE-3 head for `target` from the file `place`."""
    layer_config, norms = _layer_config(config, place), {name: _flag(config, name, place) for name in _NORMS}
    fields = {name: value for name, value in layer_config.items() if name not in _READ_HERE}
    layer = model_from_config(fields, place.parent.name, str(place))
    if layer.exportable or layer.activation != "silu":
        raise Unsupported(f"{place}: {layer.exportable or f'a head with {layer.activation}; silu is supported'}")
    _check_target(place, config, layer, target)
    return HeadConfig(
        layer_config,
        {
            "layer": layer,
            "draft_vocab_size": config.get("draft_vocab_size") or layer.vocab_size,
            "target_hidden_size": target.hidden_size,
            "hidden_layers": _hidden_layers(config, target, place),
            "window": _window(layer_config, place),
            **norms,
        },
        renamed={"midlayer.": LAYER},
        others=("d2t", "t2d", *_UNUSED),
    )


def default_layers(layers: int) -> tuple[int, ...]:
    """Return the layers that a head reads if its config names none."""
    return 2, layers // 2, layers - 3


def _layer_config(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the sizes of the head's layer in the fields of transformers, from either layout."""
    kind, architectures = config.get("speculators_model_type"), config.get("architectures")
    if kind is not None:
        if kind != "eagle3":
            raise Unsupported(
                f"{path}: speculators_model_type {quote_short(kind)} is not supported; give an eagle3 head"
            )
        nested = config.get("transformer_layer_config")
        if not isinstance(nested, dict):
            raise InvalidInput(f"{path}: transformer_layer_config is missing; is the head complete?")
        layer = {**_DEFAULTS.get(str(nested.get("model_type")), {}), **nested}
    elif architectures == [LEGACY]:
        dropped = {"draft_vocab_size", "eagle_config", "target_hidden_size", "architectures", _LAYER_IDS, *_NORMS}
        layer = {name: value for name, value in config.items() if name not in dropped}
    else:
        raise Unsupported(
            f"{path}: {quote_short(architectures)} is not a drafting head; supported: {LEGACY}, "
            "speculators' eagle3, the mtp.* tensors of a Qwen3.5 checkpoint, and gemma4_assistant"
        )
    if layer.get("model_type") not in _DEFAULTS:
        known = " and ".join(_DEFAULTS)
        raise Unsupported(f"{path}: a head of model_type {quote_short(layer.get('model_type'))}; {known} are supported")
    if layer.get("num_hidden_layers", 1) != 1:
        raise Unsupported(f"{path}: a head of {quote_short(layer['num_hidden_layers'])} layers; one is supported")
    return {**layer, "num_hidden_layers": 1, "tie_word_embeddings": False}


def _window(layer_config: dict[str, Any], path: Path) -> int | None:
    """Return the sliding window with which the head was trained; None without one."""
    kinds, window = layer_config.get("layer_types"), layer_config.get("sliding_window")
    if kinds not in (None, ["full_attention"], ["sliding_attention"]):
        raise Unsupported(f"{path}: layer_types {quote_short(kinds)}; one layer of full or sliding attention is read")
    if kinds != ["sliding_attention"]:
        return None
    if type(window) is not int:
        raise InvalidInput(f"{path}: sliding_window is {quote_short(window)}; it must be a number of tokens")
    return window


def _flag(config: dict[str, Any], name: str, path: Path) -> bool:
    nested = config.get("eagle_config")
    value = config.get(name, nested.get(name) if isinstance(nested, dict) else None)
    if value is not None and not isinstance(value, bool):
        raise InvalidInput(f"{path}: {name} is {quote_short(value)}; it must be true or false")
    return bool(value)


def _check_target(path: Path, config: dict[str, Any], layer: ModelSpec, target: ModelSpec) -> None:
    stated = config.get("target_hidden_size") or layer.hidden_size
    if stated != target.hidden_size:
        raise InvalidInput(
            f"{path}: the head reads hidden states of {quote_short(stated)} values, and {target.name} has "
            f"{target.hidden_size}; give the head of this model"
        )
    if layer.vocab_size != target.vocab_size:
        raise InvalidInput(
            f"{path}: the head is of a model with {layer.vocab_size:,} tokens, and {target.name} has "
            f"{target.vocab_size:,}; give the head of this model"
        )


def _hidden_layers(config: dict[str, Any], target: ModelSpec, path: Path) -> tuple[int, ...]:
    nested, count = config.get("eagle_config"), len(target.layers)
    stated = config.get(_LAYER_IDS) or (nested.get(_LAYER_IDS) if isinstance(nested, dict) else None)
    layers = default_layers(count) if stated is None else stated
    if not isinstance(layers, list | tuple) or any(
        type(layer) is not int or not 0 < layer <= count for layer in layers
    ):
        raise InvalidInput(
            f"{path}: {_LAYER_IDS} {quote_short(layers)}: must be layers 1 to {count} of {target.name}"
            + ("; name them, the usual ones do not exist in so small a model" if stated is None else "")
        )
    return tuple(layers)
