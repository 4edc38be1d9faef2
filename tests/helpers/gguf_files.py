"""Writes GGUF files for tests: any bytes that a case needs, and small random models with a tokenizer."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import quantize
from numpy.typing import NDArray

from edgekit.model.families import model_from_config

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
ALIGNMENT = 32


class Value(NamedTuple):
    """One metadata value; `item` is the type inside an array."""

    kind: int
    value: Any
    item: int | None = None


class Stored(NamedTuple):
    """One tensor: the number of its type, its shape with rows first, its bytes."""

    type_id: int
    shape: tuple[int, ...]
    data: bytes
    offset: int | None = None  # instead of the right one


def text(data: str | bytes) -> bytes:
    data = data.encode() if isinstance(data, str) else data
    return struct.pack("<Q", len(data)) + data


def value_bytes(value: Value) -> bytes:
    """A value with the number of its type."""
    if value.kind == STRING:
        return struct.pack("<I", STRING) + text(value.value)
    if value.kind == ARRAY:
        assert value.item is not None
        head = struct.pack("<IIQ", ARRAY, value.item, len(value.value))
        if value.item == STRING:
            return head + b"".join(text(item) for item in value.value)
        return head + struct.pack(f"<{len(value.value)}{_CODES[value.item]}", *value.value)
    return struct.pack(f"<I{_CODES[value.kind]}", value.kind, value.value)


def strings(*items: str | bytes) -> Value:
    return Value(ARRAY, items, STRING)


def gguf_bytes(metadata: Mapping[str, Value], tensors: Mapping[str, Stored], *, version: int = 3) -> bytes:
    """Return a whole file. The arguments may be inconsistent, for tests of damaged files."""
    parts = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    parts += [text(key) + value_bytes(value) for key, value in metadata.items()]
    position = 0
    for name, tensor in tensors.items():
        offset = position if tensor.offset is None else tensor.offset
        parts.append(text(name) + struct.pack("<I", len(tensor.shape)))
        parts.append(struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape)))
        parts.append(struct.pack("<IQ", tensor.type_id, offset))
        position += -(-len(tensor.data) // ALIGNMENT) * ALIGNMENT
    data = b"".join(parts)
    data += bytes(-len(data) % ALIGNMENT)
    for tensor in tensors.values():
        data += tensor.data + bytes(-len(tensor.data) % ALIGNMENT)
    return data


def byte_level_tokenizer(size: int) -> dict[str, Value]:
    """A tokenizer of bytes, eight merges and three added tokens, filled up to `size`."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    merges = ["t h", "h e", "th e", "i n", "e r", "Ġ the", "Ġ a", "0 1"]
    tokens = ["<|endoftext|>", "<s>", "<|im_end|>", *letters, *(item.replace(" ", "") for item in merges)]
    kinds = [3, 3, 3, *[1] * (len(tokens) - 3)]
    tokens += ["<tool>", *(f"[PAD{index}]" for index in range(len(tokens) + 1, size))]
    kinds += [4, *[5] * (size - len(kinds) - 1)]
    return {
        "tokenizer.ggml.model": Value(STRING, "gpt2"),
        "tokenizer.ggml.pre": Value(STRING, "smollm"),
        "tokenizer.ggml.tokens": strings(*tokens[:size]),
        "tokenizer.ggml.token_type": Value(ARRAY, kinds[:size], I32),
        "tokenizer.ggml.merges": strings(*merges),
        "tokenizer.ggml.bos_token_id": Value(U32, 1),
        "tokenizer.ggml.eos_token_id": Value(U32, 2),
        "tokenizer.ggml.padding_token_id": Value(U32, 0),
        "tokenizer.ggml.add_bos_token": Value(BOOL, False),
        "tokenizer.chat_template": Value(STRING, "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"),
    }


def sentence_piece_tokenizer(size: int, *, add_space: bool = True) -> dict[str, Value]:
    """A SentencePiece tokenizer: three control tokens, bytes, letters, some longer pieces, filled up to `size`."""
    pieces = ["▁the", "▁th", "the", "th", "▁t", "he", "in", "er", "▁", *"etainrhs"]
    tokens = ["<pad>", "<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [3, 3, 3, 2, *[6] * 256, *[1] * len(pieces)]
    tokens += ["  ", "<start_of_turn>", *(f"<unused{index}>" for index in range(size))]
    kinds += [4, 3, *[5] * size]
    scores = [0.0] * 260 + [-float(index) for index in range(size)]
    return {
        "tokenizer.ggml.model": Value(STRING, "llama"),
        "tokenizer.ggml.pre": Value(STRING, "default"),
        "tokenizer.ggml.tokens": strings(*tokens[:size]),
        "tokenizer.ggml.scores": Value(ARRAY, scores[:size], F32),
        "tokenizer.ggml.token_type": Value(ARRAY, kinds[:size], I32),
        "tokenizer.ggml.bos_token_id": Value(U32, 1),
        "tokenizer.ggml.eos_token_id": Value(U32, 2),
        "tokenizer.ggml.unknown_token_id": Value(U32, 3),
        "tokenizer.ggml.padding_token_id": Value(U32, 0),
        "tokenizer.ggml.add_space_prefix": Value(BOOL, add_space),
    }


_ARCHITECTURES = {"gemma3_text": "gemma3"}
_PERMUTED = ("llama", "smollm3")
VOCABULARY = 320
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip


def random_tensors(config: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Random weights for a config, by Hugging Face's names."""
    draw = np.random.default_rng(0)
    found = {}
    for tensor in model_from_config(dict(config), "tiny", "tiny").tensors():
        values = draw.standard_normal(tensor.shape, np.float32) * np.float32(0.2)
        # Rounded so that adding one, as llama.cpp does to Gemma's norms, is undone to the bit.
        found[tensor.name] = np.round(values * 64) / 64 if tensor.role == "norm" else values
    return found


def architecture_of(config: Mapping[str, Any]) -> str:
    """llama.cpp's name of the model's architecture."""
    family = str(config["model_type"])
    return _ARCHITECTURES.get(family, family)


def fitting(kind: int, number: int) -> int:
    """The low bits of `number` as the integer type `kind` holds them."""
    bits = 8 * struct.calcsize(f"<{_CODES[kind]}")
    low = number % (1 << bits)
    return low - (1 << bits) if _CODES[kind].islower() and low >> (bits - 1) else low


def with_metadata(whole: bytes, header_bytes: int, old: Mapping[str, Value], new: Mapping[str, Value]) -> bytes:
    """A file with other values of its metadata and the same tensors."""
    texts = [b"".join(text(key) + value_bytes(value) for key, value in each.items()) for each in (old, new)]
    header = whole[:24] + texts[1] + whole[24 + len(texts[0]) : header_bytes]
    return header + bytes(-len(header) % ALIGNMENT) + whole[header_bytes + -header_bytes % ALIGNMENT :]


def model_file(
    config: Mapping[str, Any],
    weights: Mapping[str, NDArray[np.float32]],
    *,
    types: Mapping[str, GGMLQuantizationType] | None = None,
    extra: Mapping[str, Value] | None = None,
    more: Mapping[str, Stored] | None = None,
    metadata: Mapping[str, Value] | None = None,
) -> bytes:
    """A model as llama.cpp's converter writes it, with tensor names from the `gguf` package.

    `types` gives the type of a Hugging Face tensor that is not float32; `extra` adds metadata or replaces it, `more`
    adds tensors that are no weights, `metadata` replaces everything that a converter writes.
    """
    name = architecture_of(config)
    architecture = MODEL_ARCH[name.upper()]
    names = get_tensor_name_map(architecture, int(config["num_hidden_layers"]))
    found: dict[str, Stored] = {}
    for key, values in weights.items():
        stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert stored is not None, key
        kind = (types or {}).get(key, GGMLQuantizationType.F32)
        changed = _as_llama_cpp(name, config, key, values)
        data = (
            changed.astype("<f4").tobytes() if kind == GGMLQuantizationType.F32 else quantize(changed, kind).tobytes()
        )
        found[stored] = Stored(int(kind), values.shape, data)
    keys = metadata_of(name, config) if metadata is None else dict(metadata)
    return gguf_bytes(keys | dict(extra or {}), found | dict(more or {}))


def _as_llama_cpp(
    architecture: str, config: Mapping[str, Any], name: str, values: NDArray[np.float32]
) -> NDArray[np.float32]:
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1)
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if architecture in _PERMUTED and part in name:
            count = int(config[heads])
            return (
                values.reshape(count, 2, len(values) // count // 2, *values.shape[1:])
                .swapaxes(1, 2)
                .reshape(values.shape)
            )
    return values


def metadata_of(architecture: str, config: Mapping[str, Any]) -> dict[str, Value]:
    """The metadata of a model and of a tokenizer that fits its family."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    numbers = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "vocab_size": config["vocab_size"],
    }
    if config.get("sliding_window"):
        numbers["attention.sliding_window"] = config["sliding_window"]
    found = {
        "general.architecture": Value(STRING, architecture),
        "general.type": Value(STRING, "model"),
        "general.name": Value(STRING, "Tiny"),
    }
    found |= {f"{architecture}.{key}": Value(U32, value) for key, value in numbers.items()}
    found[f"{architecture}.attention.layer_norm_rms_epsilon"] = Value(F32, config["rms_norm_eps"])
    found[f"{architecture}.rope.freq_base"] = Value(F32, config.get("rope_theta", 10000.0))
    size = int(config["vocab_size"])
    return found | (
        sentence_piece_tokenizer(size, add_space=False)
        if architecture.startswith("gemma")
        else byte_level_tokenizer(size)
    )


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "model_type": "llama", "tie_word_embeddings": True},
    "llama untied, with biases": {
        **SIZES, "model_type": "llama", "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
    },
    "qwen2": {**SIZES, "model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1000000.0},
    "qwen3": {**SIZES, "model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 32},
    "smollm3": {**SIZES, "model_type": "smollm3", "tie_word_embeddings": True, "rope_theta": 5000000.0},
    "phi3": {**SIZES, "model_type": "phi3", "tie_word_embeddings": False, "sliding_window": 48},
    "gemma2": {
        **SIZES, "model_type": "gemma2", "head_dim": 32, "sliding_window": 48, "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3": {
        **SIZES, "model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 32, "sliding_window": 48,
        "query_pre_attn_scalar": 32, "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1000000.0,
    },
}  # fmt: skip


def write_family(path: Path, family: str, **changed: Any) -> dict[str, NDArray[np.float32]]:
    """A small model of a family at `path`; returns its weights by Hugging Face's names."""
    weights = random_tensors(FAMILIES[family])
    path.write_bytes(model_file(FAMILIES[family], weights, **changed))
    return weights
