"""Reads the settings of text embeddings from a model folder, as sentence-transformers writes them.

`modules.json` lists the steps, `1_Pooling/config.json` says how hidden states are pooled. An unsupported step is
refused, because vectors made without it would be wrong.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from edgekit.common.parsing import MAX_TEXT_BYTES, parse_json, read_bytes, validate
from edgekit.errors import InvalidInput, Unsupported, quote_short
from edgekit.model.families.fields import Fields
from edgekit.model.families.shapes import MAX_HIDDEN
from edgekit.model.parts import DenseLayer, Pooling, TextEmbedding
from edgekit.model.spec import ModelSpec

MODULES, LIMITS, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
POOLING = "1_Pooling/config.json"
LOGIT_SCORE = "LogitScore"  # the last step of a reranker that is a language model
LOGIT_SCORE_CONFIG = f"1_{LOGIT_SCORE}/config.json"
SHORTENS, LENGTHS = "is_matryoshka", "matryoshka_dimensions"
FILES = (MODULES, LIMITS, PROMPTS, POOLING, LOGIT_SCORE_CONFIG, "*_Dense/config.json")
_STEPS = ("Transformer", "Pooling", "Dense", "Normalize")  # in this order; dense layers may be several
_DENSE_FOLDER = re.compile(r"[0-9]_Dense", re.ASCII)
_IDENTITY = "torch.nn.modules.linear.Identity"
_POOLINGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_BY_NAME: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}


def read_text_embedding(folder: Path, fields: Fields, spec: ModelSpec) -> TextEmbedding | None:
    """Return the embedding settings of a model's folder and of its config's `fields`; None if there are none.

    Raises `Unsupported` for steps or poolings that edgekit does not compute.
    """
    path, dimensions = folder / MODULES, _dimensions(fields)
    if not path.is_file():
        return None if dimensions is None else TextEmbedding(dimensions=dimensions)
    steps = parse_json(b'{"steps": ' + read_bytes(path, MAX_TEXT_BYTES) + b"}", str(path)).get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise InvalidInput(f"{path}: must be a list of objects; correct the file")
    kinds = [str(step.get("type", "")).rpartition(".")[2] for step in steps]
    if LOGIT_SCORE in kinds:
        return None  # a reranker
    other = next((kind for kind in kinds if kind not in _STEPS), None)
    if other is not None:
        raise Unsupported(f"{path}: step {quote_short(other)} is not supported; supported: {', '.join(_STEPS)}")
    if kinds != sorted(kinds, key=_STEPS.index):
        raise Unsupported(f"{path}: steps in the order {', '.join(kinds)} are not supported")
    dense = _dense(folder, [str(step.get("path")) for step in steps if step["type"].endswith("Dense")], spec)
    limits, prompts = _object(folder / LIMITS), _object(folder / PROMPTS)
    stated = {
        "pooling": _pooling(folder / POOLING) if "Pooling" in kinds else None,
        "normalise": "Normalize" in kinds,
        "max_tokens": limits.get("max_seq_length"),
        "prompts": prompts.get("prompts") or {},
        "default_prompt": prompts.get("default_prompt_name"),
        "dense": [layer.model_dump() for layer in dense],
        "dimensions": dimensions,
    }
    found = validate(json.dumps(stated), TextEmbedding, str(folder))
    if found.default_prompt is not None and found.default_prompt not in found.prompts:
        raise InvalidInput(f"{folder / PROMPTS}: {quote_short(found.default_prompt)} is not among the prompts")
    if dense and found.pooling == "max":
        raise Unsupported(f"{path}: dense layers after the largest values of tokens are not supported")
    return found


def dense_weights(folder: Path) -> dict[str, Path]:
    """Return the weights of the dense layers that follow a model, keyed by folder name."""
    return {path.parent.name: path for path in sorted(folder.glob("[0-9]_Dense/model.safetensors"))}


def _dense(folder: Path, names: list[str], spec: ModelSpec) -> list[DenseLayer]:
    if names and spec.encoder is None:
        raise Unsupported(f"{folder / MODULES}: step Dense is only supported in encoders")
    layers: list[DenseLayer] = []
    for name in names:
        if not _DENSE_FOLDER.fullmatch(name) or name in [layer.folder for layer in layers]:
            raise InvalidInput(f"{folder / MODULES}: path {quote_short(name)} is not that of another dense layer")
        path = folder / name / "config.json"
        fields = Fields(parse_json(read_bytes(path, MAX_TEXT_BYTES), str(path)), str(path))
        expected = layers[-1].outputs if layers else spec.hidden_size
        if fields.count("in_features", MAX_HIDDEN) != expected:
            raise fields.refusal("in_features", f"is not {expected}, the size of what comes before; correct the file")
        if fields.text("activation_function", "torch.nn.modules.activation.Tanh") != _IDENTITY:
            raise fields.unsupported("activation_function", f"is not supported; supported: {_IDENTITY}")
        for field in ("module_input_name", "module_output_name"):
            if fields.get(field) not in (None, "sentence_embedding"):
                raise fields.unsupported(field, "is not supported; supported: sentence_embedding")
        outputs, bias = fields.count("out_features", MAX_HIDDEN), fields.flag("bias", True)
        if strange := next((field for _, field in fields.unread()), None):
            raise fields.unsupported(strange, "is not a known field of a dense layer; correct the file")
        layers.append(DenseLayer(folder=name, inputs=expected, outputs=outputs, bias=bias))
    return layers


def _dimensions(fields: Fields) -> tuple[int, ...] | None:
    """Return the lengths that vectors may be cut to, from the two fields that vLLM also reads."""
    lengths = fields.counts(LENGTHS, MAX_HIDDEN, least=1)
    return lengths or (() if fields.flag(SHORTENS, False) else None)


def _pooling(path: Path) -> Pooling:
    config = _object(path)
    if config.get("include_prompt") is False:
        raise Unsupported(f"{path}: include_prompt false is not supported: a prompt is pooled with its text")
    named = config.get("pooling_mode")
    chosen = [mode for mode in config if mode.startswith("pooling_mode_") and config[mode]] if named is None else []
    found = _BY_NAME.get(str(named)) if named is not None else _POOLINGS.get(chosen[0]) if len(chosen) == 1 else None
    if found is None:
        said = quote_short(named if named is not None else ", ".join(chosen) or "none")
        raise Unsupported(f"{path}: pooling {said} is not supported; supported: {', '.join(_BY_NAME)}")
    return found


def _object(path: Path) -> dict[str, Any]:
    return parse_json(read_bytes(path, MAX_TEXT_BYTES), str(path)) if path.is_file() else {}
