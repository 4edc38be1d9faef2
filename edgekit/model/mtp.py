"""Reads the config of the multi-token-prediction (MTP) part of a Qwen3.5 checkpoint, its `mtp.*` tensors.

It was trained with the model and uses the model's embedding and head. A sealed one has rows for the likeliest tokens of
its head alone: all of them would be dearer to read than a 4-bit model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgekit.errors import InvalidInput, Unsupported, quote_short
from edgekit.model.families import model_from_config
from edgekit.model.head_spec import HEAD, SEALED, TARGET_NORM, HeadConfig
from edgekit.model.spec import ModelSpec

FAMILIES = ("qwen3_5", "qwen3_5_text")
# A draft reads 0.22 of a step's bytes with 8,192 rows. More rows cost more in every draft than their tokens gain.
DRAFT_TOKENS = 8192


def is_mtp(config: dict[str, Any]) -> bool:
    """Return True for the config of a model whose checkpoints have the part, and of a sealed part."""
    return config.get("model_type") in FAMILIES or config.get(SEALED) == "mtp"


def read_mtp(config: dict[str, Any], place: Path, target: ModelSpec) -> HeadConfig:
    """Read the config of a checkpoint of `target`, or of its sealed MTP part, from the file `place`."""
    files: dict[str, Any] = {"prefix": "mtp.", "from_target": (HEAD, TARGET_NORM), "others": ()}
    if SEALED in config:
        layer_config, count = config.get("transformer_layer_config"), config.get("draft_vocab_size")
        if not isinstance(layer_config, dict):
            raise InvalidInput(f"{place}: transformer_layer_config is missing; is the head complete?")
        files = {}  # sealing added what is shared
    else:
        layer_config, count = _layer_config(config, place, target), min(DRAFT_TOKENS, target.vocab_size)
    layer = model_from_config(layer_config, place.parent.name, str(place))
    if len(layer.layers) != 1 or layer.layers[0].is_recurrent or _shape(layer) != _shape(target):
        raise InvalidInput(f"{place}: is not one layer of full attention as wide as {target.name}; export it again")
    sizes = {
        "kind": "mtp",
        "layer": layer,
        "draft_vocab_size": count,
        "target_hidden_size": target.hidden_size,
        "hidden_layers": (len(target.layers),),
        "norm_output": True,
    }
    return HeadConfig(layer_config, sizes, **files)


def _layer_config(config: dict[str, Any], path: Path, target: ModelSpec) -> dict[str, Any]:
    """Return the config of the only layer, which is one of the model's layers of full attention."""
    model = model_from_config(config, path.parent.name, str(path))
    if model.exportable:
        raise Unsupported(f"{path}: {model.exportable}; give the float checkpoint")
    theirs, ours = ((*_shape(each), len(each.layers)) for each in (model, target))
    if theirs != ours:
        raise InvalidInput(
            f"{path}: is the checkpoint of another model than {target.name} (family, width, tokens, layers: {theirs}, "
            f"not {ours}); give the checkpoint of this model"
        )
    text = config.get("text_config") or config
    if text.get("mtp_use_dedicated_embeddings"):
        raise Unsupported(f"{path}: mtp_use_dedicated_embeddings; an MTP part with the model's embedding is read")
    if text.get("mtp_num_hidden_layers", 1) != 1:
        raise Unsupported(
            f"{path}: an MTP part of {quote_short(text['mtp_num_hidden_layers'])} layers; one layer is read"
        )
    return {
        **text,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "tie_word_embeddings": False,
    }


def _shape(model: ModelSpec) -> tuple[str, int, int]:
    """Return the sizes that a part and its model have in common."""
    return model.family, model.hidden_size, model.vocab_size
