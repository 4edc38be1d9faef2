"""Reads the config of Gemma 4's assistant: a few layers that draft with the model's own keys and values.

The assistant computes only queries. Each of its layers attends to the last layer of the model that stores keys and
values of the same kind, sliding or full. Its head has a row for each token: a small assistant reads only the likeliest
of many clusters of rows; any other is sealed with rows for only the likeliest tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgekit.errors import InvalidInput, Unsupported, quote_short
from edgekit.model.families import model_from_config
from edgekit.model.head_spec import CENTROIDS, HEAD, SEALED, TARGET_NORM, HeadConfig
from edgekit.model.mtp import DRAFT_TOKENS
from edgekit.model.parts import Layer
from edgekit.model.spec import ModelSpec

MODEL_TYPE, FAMILY = "gemma4_assistant", "gemma4_text"
_IN_FILES = {
    "model.embed_tokens.weight": HEAD,  # the two are tied
    "masked_embedding.centroids.weight": CENTROIDS,
    "masked_embedding.": "",
    "model.": "",
}


def is_assistant(config: dict[str, Any]) -> bool:
    """Return True for the config of an assistant, and of a sealed one."""
    return config.get("model_type") == MODEL_TYPE or config.get(SEALED) == "assistant"


def read_assistant(config: dict[str, Any], place: Path, target: ModelSpec) -> HeadConfig:
    """Read the config of an assistant of `target`, or of a sealed one, from the file `place`."""
    is_sealed = SEALED in config
    layer_config = config.get("text_config")
    if not isinstance(layer_config, dict):
        raise InvalidInput(f"{place}: text_config is missing; is the assistant complete?")
    if not is_sealed:
        layer_config = _layer_config(layer_config, place)
    layer = model_from_config(layer_config, place.parent.name, str(place))
    if layer.family != FAMILY or layer.exportable:
        raise Unsupported(f"{place}: {layer.exportable or f'an assistant of {layer.family}'}; {FAMILY} is supported")
    if layer.activation != "gelu_tanh":
        raise Unsupported(f"{place}: an assistant with {layer.activation}; gelu_pytorch_tanh is supported")
    _check_target(place, config, layer, target)
    clusters, active = _clusters(config, place, layer)
    chosen = config.get("draft_vocab_size") if is_sealed else min(DRAFT_TOKENS, layer.vocab_size)
    sizes = {
        "kind": "assistant",
        "layer": layer,
        "draft_vocab_size": layer.vocab_size if clusters else chosen,
        "target_hidden_size": target.hidden_size,
        "hidden_layers": (len(target.layers),),
        "norm_output": True,
        "kv_layers": tuple(_kv_layer(place, index, layer, target) for index in range(len(layer.layers))),
        "clusters": clusters,
        "active_clusters": active,
    }
    if is_sealed:
        return HeadConfig(layer_config, sizes)
    others = ("token_ordering",) if clusters else ()
    return HeadConfig(layer_config, sizes, from_target=(TARGET_NORM,), renamed=_IN_FILES, others=others, all_rows=True)


def _layer_config(text: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the config of the layers as if each had keys and values, in the shapes of the model's."""
    count, shared = text.get("num_hidden_layers"), text.get("num_kv_shared_layers")
    if shared not in (None, 0, count):
        raise Unsupported(
            f"{path}: num_kv_shared_layers is {quote_short(shared)} of {quote_short(count)} layers; an assistant "
            "shares the model's keys and values in all of them"
        )
    for name in ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp"):
        if text.get(name):
            raise Unsupported(f"{path}: {name} is {quote_short(text[name])}; an assistant without is supported")
    return {**text, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "tie_word_embeddings": True}


def _check_target(path: Path, config: dict[str, Any], layer: ModelSpec, target: ModelSpec) -> None:
    if target.family != FAMILY:
        raise InvalidInput(f"{path}: an assistant of Gemma 4, and {target.name} is {target.family}; give its own head")
    theirs = config.get("backbone_hidden_size"), layer.vocab_size, layer.norm_epsilon
    ours = target.hidden_size, target.vocab_size, target.norm_epsilon
    if theirs != ours:
        raise InvalidInput(
            f"{path}: is the assistant of another model than {target.name} (backbone_hidden_size, tokens, "
            f"rms_norm_eps: {quote_short(theirs)}, not {ours}); give the assistant of this model"
        )


def _clusters(config: dict[str, Any], path: Path, layer: ModelSpec) -> tuple[int | None, int | None]:
    """Return the number of clusters of rows, and how many of them are read; None for a head without clusters."""
    if not config.get("use_ordered_embeddings"):
        return None, None
    count, active = config.get("num_centroids"), config.get("centroid_intermediate_top_k")
    if type(count) is not int or count < 1 or layer.vocab_size % count:
        raise InvalidInput(f"{path}: num_centroids {quote_short(count)} does not divide {layer.vocab_size:,} tokens")
    if type(active) is not int or not 1 <= active <= count:
        raise InvalidInput(f"{path}: centroid_intermediate_top_k {quote_short(active)} is not 1 to {count}")
    return count, active


def _kv_layer(path: Path, index: int, model: ModelSpec, target: ModelSpec) -> int:
    """Return the target's layer whose keys and values layer `index` attends to: the last of its kind and shape."""
    layer, is_sliding = model.layers[index], model.layers[index].window is not None
    storing = {
        other: _shape(target, target.layers[other])
        for other in target.storing_layers
        if (target.layers[other].window is not None) == is_sliding
    }
    owner = max(storing, default=None)
    if owner is None or storing[owner] != _shape(model, layer):
        found = "none" if owner is None else storing[owner]
        raise InvalidInput(
            f"{path}: layer {index} attends to keys and values of the shape {_shape(model, layer)} (window, heads, "
            f"head_dim, rope), and the last {'sliding' if is_sliding else 'full'} ones of {target.name} have {found}; "
            "give the assistant of this model"
        )
    return owner


def _shape(model: ModelSpec, layer: Layer) -> tuple[object, ...]:
    rope = None if layer.rope is None else model.ropes[layer.rope]
    turned = None if rope is None else (rope.kind, rope.theta, rope.dim, rope.factor, rope.proportion)
    return layer.window, layer.kv_heads, layer.head_dim, turned
