"""Converts a GGUF file's metadata to a Hugging Face `config.json`, and describes its tensors. Pure data.

llama.cpp renames tensors, reorders the rows of q and k in some families and adds one to Gemma's norms; the returned
description says how to undo that. Unknown keys, tensors and architectures are refused, because they could change the
model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from edgekit.errors import InvalidInput, Unsupported, quote_short
from edgekit.formats.gguf_tensors import TensorView
from edgekit.model.gguf_keys import ArchitectureKeys
from edgekit.model.gguf_rope import read_rope_scaling

MAX_LAYERS = 1 << 10
DEFAULT_THETA = 10_000.0  # of rope.freq_base and of rope.freq_base_swa

_COMMON = (
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "attention.key_length", "attention.value_length", "attention.causal", "rope.dimension_count", "rope.freq_base",
)  # fmt: skip
_SCALING = (
    "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
)  # fmt: skip
_EXPERTS = ("expert_count", "expert_used_count")  # old files write zeros
_WINDOW = ("attention.sliding_window",)
_PATTERN = ("attention.sliding_window_pattern",)
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")

_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_PHI3 = {
    "attn_norm": "input_layernorm", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GEMMA = _LAYER | {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = re.compile(r"blk\.(?P<layer>0|[1-9]\d{0,3})\.(?P<part>[a-z_]+)\.(?P<kind>weight|bias)")
_OF_TOP = re.compile(r"(?P<part>[a-z_]+)\.weight")


class GgufArchitecture(NamedTuple):
    """One family in llama.cpp's conventions."""

    model_type: str
    class_name: str
    keys: tuple[str, ...]
    layer: Mapping[str, str]
    interleaved: bool = False  # rows of q and k are stored as pairs of rotary halves
    norm_offset: float = 0.0  # added to every norm to get Hugging Face's
    biases: tuple[str, ...] = ()  # parts of a layer that may have a bias
    rope_tensors: tuple[str, ...] = ()


_QKVO = ("attn_q", "attn_k", "attn_v", "attn_output")
ARCHITECTURES = {
    "llama": GgufArchitecture(
        "llama", "LlamaForCausalLM", (*_COMMON, *_SCALING, *_EXPERTS), _LAYER, interleaved=True,
        biases=(*_QKVO, "ffn_gate", "ffn_up", "ffn_down"), rope_tensors=("rope_freqs.weight",),
    ),
    "smollm3": GgufArchitecture(
        "smollm3", "SmolLM3ForCausalLM", (*_COMMON, *_SCALING), _LAYER, interleaved=True,
        biases=(*_QKVO, "ffn_gate", "ffn_up", "ffn_down"),
    ),
    "qwen2": GgufArchitecture("qwen2", "Qwen2ForCausalLM", (*_COMMON, *_SCALING), _LAYER, biases=_QKVO[:3]),
    "qwen3": GgufArchitecture(
        "qwen3", "Qwen3ForCausalLM", (*_COMMON, *_SCALING), _LAYER | _QK_NORMS, biases=_QKVO
    ),
    "phi3": GgufArchitecture(
        "phi3", "Phi3ForCausalLM", (*_COMMON, *_SCALING, *_WINDOW), _PHI3,
        rope_tensors=("rope_factors_long.weight", "rope_factors_short.weight"),
    ),
    "gemma2": GgufArchitecture(
        "gemma2", "Gemma2ForCausalLM", (*_COMMON, *_WINDOW, *_PATTERN, *_SOFTCAPS), _GEMMA, norm_offset=-1.0,
    ),
    "gemma3": GgufArchitecture(
        "gemma3_text", "Gemma3ForCausalLM",
        (*_COMMON, *_SCALING, *_WINDOW, *_PATTERN, *_SOFTCAPS[1:], "rope.freq_base_swa", "rope.dimension_count_swa"),
        _GEMMA | _QK_NORMS, norm_offset=-1.0,
    ),
}  # fmt: skip


def is_rope_tensor(name: str) -> bool:
    """Return True for the name of a tensor with rotary factors, whose values become part of the config."""
    return any(name in architecture.rope_tensors for architecture in ARCHITECTURES.values())


class HuggingFaceModel(NamedTuple):
    """A GGUF model in Hugging Face's format."""

    config: dict[str, Any]
    views: dict[str, TensorView]  # by Hugging Face's name


def huggingface_model(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Sequence[float]],
    where: str,
) -> HuggingFaceModel:
    """Return the config and the tensors of a GGUF model.

    `shapes` holds the shape of every tensor, rows first; `read` returns the values of a small tensor (rope factors);
    `where` is the file that errors name.
    """
    kind = metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise Unsupported(
            f"{where}: general.type is {quote_short(kind)}; only whole models can be exported, not adapters or parts"
        )
    name = metadata.get("general.architecture")
    architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        raise Unsupported(
            f"{where}: general.architecture {quote_short(name)} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    keys = ArchitectureKeys(metadata, str(name), where)
    keys.refuse_others(architecture.keys)
    views = _views(architecture, shapes, keys)
    return HuggingFaceModel(_config(architecture, keys, shapes, read), views)


def _views(
    architecture: GgufArchitecture, shapes: Mapping[str, tuple[int, ...]], keys: ArchitectureKeys
) -> dict[str, TensorView]:
    heads, kv_heads = keys.count("attention.head_count"), _kv_heads(keys)
    views: dict[str, TensorView] = {}
    for name in shapes:
        if name in architecture.rope_tensors:
            continue
        target, part = _named(architecture, name)
        if target is None:
            raise Unsupported(
                f"{keys.where}: tensor {quote_short(name)} is not known in this architecture, and leaving it out "
                "could change the model; export from the original checkpoint"
            )
        permuted = {"attn_q": heads, "attn_k": kv_heads}.get(part, 0) if architecture.interleaved else 0
        offset = architecture.norm_offset if part.endswith("norm") else 0.0
        views[target] = TensorView(name, permuted, offset)
    return views


def _named(architecture: GgufArchitecture, name: str) -> tuple[str | None, str]:
    """Return a tensor's Hugging Face name (None if it has none), and the name of its part."""
    if match := _OF_LAYER.fullmatch(name):
        part, kind = match["part"], match["kind"]
        module = architecture.layer.get(part)
        if module is None or (kind == "bias" and part not in architecture.biases):
            return None, part
        return f"model.layers.{match['layer']}.{module}.{kind}", part
    if match := _OF_TOP.fullmatch(name):
        module = TOP.get(match["part"])
        return (f"{module}.weight" if module else None), match["part"]
    return None, ""


def _kv_heads(keys: ArchitectureKeys) -> int:
    return keys.count("attention.head_count_kv", keys.count("attention.head_count"))


def _config(
    architecture: GgufArchitecture,
    keys: ArchitectureKeys,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Sequence[float]],
) -> dict[str, Any]:
    if keys.get("attention.causal") is not None and keys.get("attention.causal") is not True:
        raise keys.unsupported("attention.causal", "makes an encoder of it, which cannot generate")
    for key in _EXPERTS:
        if keys.count(key, 0, least=0):
            raise keys.unsupported(key, "makes a mixture of experts of it, which is not supported as GGUF")
    layers = keys.count("block_count")
    if layers > MAX_LAYERS:
        raise keys.refusal("block_count", f"is more than {MAX_LAYERS:,} layers")
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    epsilon = keys.get("attention.layer_norm_rms_epsilon")
    if epsilon is None:
        raise InvalidInput(f"{keys.where}: no attention.layer_norm_rms_epsilon; is the file complete?")
    head_dim = _head_dim(keys, hidden, heads)
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(keys),
        "head_dim": head_dim,
        "vocab_size": _vocabulary(keys, shapes),
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", 0.0),
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_theta": keys.number("rope.freq_base", DEFAULT_THETA),
        "dtype": "float32",
    }
    if architecture.model_type.startswith("gemma"):
        config |= _gemma(architecture.model_type, keys, config)
    else:
        config |= {"hidden_act": "silu"} | _biases(architecture, shapes)
        if architecture.model_type == "phi3":
            config |= {"sliding_window": keys.count("attention.sliding_window", 0, least=0) or None}
            original = keys.count("rope.scaling.original_context_length", 0, least=0)
            config |= {"original_max_position_embeddings": original} if original else {}
    config |= _partial(architecture, keys, head_dim)
    present = [name for name in architecture.rope_tensors if name in shapes]
    scaling = read_rope_scaling(keys, config, present, read)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _head_dim(keys: ArchitectureKeys, hidden: int, heads: int) -> int:
    if keys.get("attention.key_length") is None and hidden % heads:
        raise keys.refusal("attention.head_count", f"does not divide embedding_length {hidden}")
    head_dim = keys.count("attention.key_length", hidden // heads)
    if keys.count("attention.value_length", head_dim) != head_dim:
        raise keys.unsupported("attention.value_length", f"is not attention.key_length ({head_dim})")
    return head_dim


def _vocabulary(keys: ArchitectureKeys, shapes: Mapping[str, tuple[int, ...]]) -> int:
    shape = shapes.get("token_embd.weight", ())
    if len(shape) != 2:
        raise InvalidInput(f"{keys.where}: token_embd.weight has shape {list(shape)}; is the file complete?")
    if keys.count("vocab_size", shape[0]) != shape[0]:
        raise keys.refusal("vocab_size", f"is not the {shape[0]:,} rows of token_embd.weight")
    return shape[0]


def _biases(architecture: GgufArchitecture, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Return the switches of biases; a model with only some of the tensors is refused later, by the missing tensor."""
    switches: dict[str, bool] = {}
    if architecture.model_type in ("llama", "smollm3", "qwen3"):
        switches["attention_bias"] = any(f"blk.0.{part}.bias" in shapes for part in _QKVO)
    if architecture.model_type in ("llama", "smollm3"):
        switches["mlp_bias"] = any(f"blk.0.{part}.bias" in shapes for part in ("ffn_gate", "ffn_up", "ffn_down"))
    return switches


def _gemma(model_type: str, keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    layers, heads, hidden = (config[key] for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    # No key holds the attention scale; like llama.cpp, recognise the two largest models by their number of layers.
    largest = {"gemma2": 46, "gemma3_text": 62}[model_type]
    fields: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if layers == largest else config["head_dim"],
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "attn_logit_softcapping": None,
        "attention_bias": False,
    }
    if model_type == "gemma2":
        fields["attn_logit_softcapping"] = keys.number("attn_logit_softcapping", 50.0)
        fields["final_logit_softcapping"] = keys.number("final_logit_softcapping", 30.0)
        fields["sliding_window"] = keys.count("attention.sliding_window", 4096)
    else:
        fields["rope_local_base_freq"] = keys.number("rope.freq_base_swa", DEFAULT_THETA)
        fields["sliding_window"] = keys.count("attention.sliding_window", 0, least=0) or None
    fields["layer_types"] = _layer_types(keys, layers, 2 if model_type == "gemma2" else 6, fields["sliding_window"])
    return fields


def _layer_types(keys: ArchitectureKeys, layers: int, default: int, window: int | None) -> list[str]:
    """Return the kind of every layer as listed in the file; otherwise, every `pattern`-th has full attention."""
    value = keys.get("attention.sliding_window_pattern")
    if hasattr(value, "tolist"):
        if len(value) != layers:
            raise keys.refusal(
                "attention.sliding_window_pattern", f"does not have one value for each of {layers} layers"
            )
        windowed = [bool(item) for item in value]
    else:
        pattern = keys.count("attention.sliding_window_pattern", default)
        windowed = [(index + 1) % pattern != 0 for index in range(layers)]
    return ["sliding_attention" if item and window else "full_attention" for item in windowed]


def _partial(architecture: GgufArchitecture, keys: ArchitectureKeys, head_dim: int) -> dict[str, float]:
    """Return `partial_rotary_factor` if only a part of each head is rotated."""
    for key in ("rope.dimension_count", "rope.dimension_count_swa"):
        turning = keys.count(key, head_dim)
        if turning == head_dim:
            continue
        if architecture.model_type != "phi3" or turning > head_dim:
            raise keys.unsupported(key, f"is not the {head_dim} dimensions of a head, which is not supported here")
        return {"partial_rotary_factor": turning / head_dim}
    return {}
