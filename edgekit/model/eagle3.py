"""Reads EAGLE-3 heads in both published layouts, as safetensors: one decoder layer that drafts from hidden states.

`LlamaForCausalLMEagle3` calls the layer `midlayer`; vLLM's `speculators` nests its sizes and calls it `layers.0`. Every
size is checked against the target model before a weight is read, and tensors without a use are refused by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from edgekit.common.parsing import parse_json, read_bytes, sentence_of
from edgekit.errors import InvalidInput, Unsupported, quote_short
from edgekit.formats.safetensors import TensorFolder
from edgekit.model.eagle3_spec import LAYER, Eagle3Spec
from edgekit.model.families import model_from_config
from edgekit.model.same_vocabulary import check_same_vocabulary
from edgekit.model.spec import ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONFIG = "config.json"
LEGACY = "LlamaForCausalLMEagle3"
EMBEDDING = "embed_tokens.weight"
_MAX_CONFIG_BYTES = 4 << 20
_FLOATS = ("F32", "F16", "BF16")
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
_READ_HERE = ("layer_types", "sliding_window", "max_window_layers", "use_sliding_window")
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Tensors that duplicate the target's, or follow from the config.
_UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight", "layers.0.self_attn.rotary_emb.inv_freq")


class Eagle3Weights(NamedTuple):
    """The files of a head, checked: its sizes and its stored weights. `Eagle3Decoder` runs them."""

    spec: Eagle3Spec
    layer_config: dict[str, Any]  # the sizes of its layer, in transformers' fields
    targets: NDArray[np.int64]  # the target's token for each draft token
    tensors: TensorFolder
    stored: Mapping[str, str]  # names in `spec.tensors()` → names in the files

    def floats(self, name: str) -> NDArray[np.float32]:
        """Return a weight in float32."""
        return self.tensors.floats(self.stored[name])

    def rows(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the embeddings of the target's tokens, if the head has an embedding."""
        return self.tensors.floats(self.stored[EMBEDDING], tokens)

    def close(self) -> None:
        """Unmap the files that no array refers to."""
        self.tensors.close()


def read_head_spec(folder: Path, target: ModelSpec, tokenizer: Path) -> Eagle3Spec:
    """Return the sizes of the head in `folder`, checked against `target`.

    If the head has a tokenizer, it must be the one in the target's folder `tokenizer`.
    """
    head = read_eagle3(folder, target)
    head.close()
    if all((each / "tokenizer.json").exists() for each in (folder, tokenizer)):
        check_same_vocabulary(tokenizer, folder)
    return head.spec


def read_eagle3(folder: Path, target: ModelSpec) -> Eagle3Weights:
    """Read the head in `folder` for `target`.

    Raises `InvalidInput` or `Unsupported` for a head of another model, a damaged one, or one with unsupported parts.
    """
    place = folder / CONFIG
    data = read_bytes(place, _MAX_CONFIG_BYTES)
    config = parse_json(data, str(place))
    layer_config, norms = _layer_config(config, place), {name: _flag(config, name, place) for name in _NORMS}
    fields = {name: value for name, value in layer_config.items() if name not in _READ_HERE}
    layer = model_from_config(fields, folder.name, str(place))
    if layer.exportable or layer.activation != "silu":
        raise Unsupported(f"{place}: {layer.exportable or f'a head with {layer.activation}; silu is supported'}")
    _check_target(place, config, layer, target)
    tensors = TensorFolder.open(folder)
    try:
        digest = hashlib.sha256(data + repr(sorted(tensors.entries.items())).encode())
        stored = {_canonical(name): name for name in tensors.entries}
        try:
            spec = Eagle3Spec(
                layer=layer,
                draft_vocab_size=config.get("draft_vocab_size") or layer.vocab_size,
                target_hidden_size=target.hidden_size,
                hidden_layers=_hidden_layers(config, target, place),
                window=_window(layer_config, place),
                own_embedding=EMBEDDING in stored,
                sha256=digest.hexdigest(),
                **norms,
            )
        except ValidationError as error:
            raise InvalidInput(f"{place}: {sentence_of(error)}; correct the file") from error
        _check_tensors(folder, spec, tensors, stored)
        return Eagle3Weights(spec, layer_config, _targets(folder, spec, tensors, stored), tensors, stored)
    except BaseException:
        tensors.close()
        raise


def default_layers(layers: int) -> tuple[int, ...]:
    """Return the layers that a head reads if its config names none."""
    return 2, layers // 2, layers - 3


def _layer_config(config: dict[str, Any], place: Path) -> dict[str, Any]:
    """Return the sizes of the head's layer in the fields of transformers, from either layout."""
    kind, architectures = config.get("speculators_model_type"), config.get("architectures")
    if kind is not None:
        if kind != "eagle3":
            raise Unsupported(
                f"{place}: speculators_model_type {quote_short(kind)} is not supported; give an eagle3 head"
            )
        nested = config.get("transformer_layer_config")
        if not isinstance(nested, dict):
            raise InvalidInput(f"{place}: transformer_layer_config is missing; is the head complete?")
        layer = {**_DEFAULTS.get(str(nested.get("model_type")), {}), **nested}
    elif architectures == [LEGACY]:
        dropped = {"draft_vocab_size", "eagle_config", "target_hidden_size", "architectures", _LAYER_IDS, *_NORMS}
        layer = {name: value for name, value in config.items() if name not in dropped}
    else:
        raise Unsupported(
            f"{place}: {quote_short(architectures)} is not an EAGLE-3 head; supported: {LEGACY} and speculators' eagle3"
        )
    if layer.get("model_type") not in _DEFAULTS:
        known = " and ".join(_DEFAULTS)
        raise Unsupported(
            f"{place}: a head of model_type {quote_short(layer.get('model_type'))}; {known} are supported"
        )
    if layer.get("num_hidden_layers", 1) != 1:
        raise Unsupported(f"{place}: a head of {quote_short(layer['num_hidden_layers'])} layers; one is supported")
    return {**layer, "num_hidden_layers": 1, "tie_word_embeddings": False}


def _window(layer_config: dict[str, Any], place: Path) -> int | None:
    """Return the sliding window with which the head was trained; None without one."""
    kinds, window = layer_config.get("layer_types"), layer_config.get("sliding_window")
    if kinds not in (None, ["full_attention"], ["sliding_attention"]):
        raise Unsupported(f"{place}: layer_types {quote_short(kinds)}; one layer of full or sliding attention is read")
    if kinds != ["sliding_attention"]:
        return None
    if type(window) is not int:
        raise InvalidInput(f"{place}: sliding_window is {quote_short(window)}; it must be a number of tokens")
    return window


def _flag(config: dict[str, Any], name: str, place: Path) -> bool:
    nested = config.get("eagle_config")
    value = config.get(name, nested.get(name) if isinstance(nested, dict) else None)
    if value is not None and not isinstance(value, bool):
        raise InvalidInput(f"{place}: {name} is {quote_short(value)}; it must be true or false")
    return bool(value)


def _check_target(place: Path, config: dict[str, Any], layer: ModelSpec, target: ModelSpec) -> None:
    stated = config.get("target_hidden_size") or layer.hidden_size
    if stated != target.hidden_size:
        raise InvalidInput(
            f"{place}: the head reads hidden states of {quote_short(stated)} values, and {target.name} has "
            f"{target.hidden_size}; give the head of this model"
        )
    if layer.vocab_size != target.vocab_size:
        raise InvalidInput(
            f"{place}: the head is of a model with {layer.vocab_size:,} tokens, and {target.name} has "
            f"{target.vocab_size:,}; give the head of this model"
        )


def _hidden_layers(config: dict[str, Any], target: ModelSpec, place: Path) -> tuple[int, ...]:
    nested, count = config.get("eagle_config"), len(target.layers)
    stated = config.get(_LAYER_IDS) or (nested.get(_LAYER_IDS) if isinstance(nested, dict) else None)
    layers = default_layers(count) if stated is None else stated
    if not isinstance(layers, list | tuple) or any(
        type(layer) is not int or not 0 < layer <= count for layer in layers
    ):
        raise InvalidInput(
            f"{place}: {_LAYER_IDS} {quote_short(layers)}: must be layers 1 to {count} of {target.name}"
            + ("; name them, the usual ones do not exist in so small a model" if stated is None else "")
        )
    return tuple(layers)


def _canonical(name: str) -> str:
    """Return the name of a tensor in `speculators`' layout."""
    return name.replace("midlayer.", LAYER, 1) if name.startswith("midlayer.") else name


def _check_tensors(folder: Path, spec: Eagle3Spec, tensors: TensorFolder, stored: Mapping[str, str]) -> None:
    expected = dict(spec.tensors())
    if spec.own_embedding:
        expected[EMBEDDING] = (spec.layer.vocab_size, spec.layer.hidden_size)
    elif spec.layer.hidden_size != spec.target_hidden_size:
        raise InvalidInput(f"{folder}: the head is narrower than its target and has no {EMBEDDING}; is it complete?")
    for name, shape in expected.items():
        entry = tensors.entry(stored.get(name, name))
        if entry.shape != shape:
            raise InvalidInput(
                f"{folder}: tensor {quote_short(stored[name])} has the shape {list(entry.shape)}, not {list(shape)}"
            )
        if entry.dtype not in _FLOATS:
            raise Unsupported(
                f"{folder}: tensor {quote_short(stored[name])} is stored as {entry.dtype}; floats are read"
            )
        if name != EMBEDDING and not np.isfinite(tensors.floats(stored[name])).all():
            raise InvalidInput(
                f"{folder}: tensor {quote_short(stored[name])} holds infinite values or none; copy it again"
            )
    unknown = sorted(stored.keys() - expected.keys() - {"d2t", "t2d", *_UNUSED})
    if unknown:
        raise Unsupported(f"{folder}: tensor {quote_short(stored[unknown[0]])} is not part of a supported EAGLE-3 head")


def _targets(folder: Path, spec: Eagle3Spec, tensors: TensorFolder, stored: Mapping[str, str]) -> NDArray[np.int64]:
    """Return the target's token for each draft token: `d2t` holds differences, and `t2d` marks the same tokens."""
    vocabulary, count = spec.layer.vocab_size, spec.draft_vocab_size
    if "d2t" not in stored:
        if count != vocabulary:
            raise InvalidInput(f"{folder}: {count:,} draft tokens of {vocabulary:,} and no d2t; is the head complete?")
        return np.arange(count, dtype=np.int64)
    entry = tensors.entry("d2t")
    if entry.dtype != "I64" or entry.shape != (count,):
        raise InvalidInput(f"{folder}: d2t is {entry.dtype} {list(entry.shape)}, expected I64 [{count}]")
    offsets = tensors.array("d2t")
    if np.abs(offsets.clip(-vocabulary - 1, vocabulary + 1)).max() > vocabulary:
        raise InvalidInput(f"{folder}: d2t leads outside the vocabulary of {vocabulary:,}")
    targets: NDArray[np.int64] = np.arange(count, dtype=np.int64) + offsets
    if targets.min() < 0 or targets.max() >= vocabulary or len(np.unique(targets)) != count:
        raise InvalidInput(f"{folder}: d2t leads outside the vocabulary of {vocabulary:,}, or to one token twice")
    if "t2d" in stored:
        marks = tensors.entry("t2d")
        if marks.dtype != "BOOL" or marks.shape != (vocabulary,):
            raise InvalidInput(f"{folder}: t2d is {marks.dtype} {list(marks.shape)}, expected BOOL [{vocabulary}]")
        marked = np.flatnonzero(tensors.array("t2d").view(np.uint8))
        if not np.array_equal(marked, np.sort(targets)):
            raise InvalidInput(f"{folder}: d2t and t2d name different tokens; copy the head again")
    return targets
