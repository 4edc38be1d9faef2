"""Neutral weights as a GGUF file for llama.cpp: S4 as Q4_0 and S8 as Q8_0, the same integers and the same scales.

Its blocks hold 32 values, so larger groups repeat their scale. It writes what a benchmark needs and no tokenizer: the
same token ids are fed to every arm.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.errors import Unsupported
from edgekit.files import disk_full
from edgekit.model import ModelSpec, Rope, Tensor
from edgekit.rope import frequencies
from edgekit.weights.neutral import NeutralWeights

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8
BLOCK = 32
_BYTES = {F32: (1, 4), F16: (1, 2), Q4_0: (BLOCK, 18), Q8_0: (BLOCK, 34)}  # values, bytes
_UINT32, _FLOAT32, _STRING = 4, 6, 8
_PIECE_ROWS = 4096
# Architectures whose layers llama.cpp computes as ours; "pairs" says that it turns neighbouring values together.
_ARCHITECTURES = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}
_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


class Entry(NamedTuple):
    """One tensor of the file."""

    name: str
    kind: int
    shape: tuple[int, ...]  # rows first, as we count
    pieces: Callable[[], Iterator[NDArray[Any]]]

    @property
    def bytes(self) -> int:
        values, size = _BYTES[self.kind]
        return int(np.prod(self.shape, dtype=np.int64)) // values * size


def write_gguf(weights: NeutralWeights, path: Path, context: int) -> None:
    """The whole model as one file."""
    refuse(weights.model)
    entries = list(_entries(weights, context))
    with disk_full(path, sum(entry.bytes for entry in entries)), path.open("wb") as file:
        file.write(_header(_metadata(weights.model, context), entries))
        file.write(bytes(-file.tell() % ALIGNMENT))
        for entry in entries:
            for piece in entry.pieces():
                file.write(np.ascontiguousarray(piece).data)
            file.write(bytes(-file.tell() % ALIGNMENT))


def refuse(model: ModelSpec) -> None:
    """Models that this writer does not know are refused by name."""
    if model.family not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise Unsupported(f"llama.cpp: no GGUF is written for {model.family} (known: {known}); leave this peer out")
    odd = [rope.kind for rope in model.ropes.values() if rope.kind not in ("default", "linear", "llama3")]
    if odd or len(model.ropes) != 1 or any(layer.rope is None or layer.window for layer in model.layers):
        raise Unsupported(f"llama.cpp: no GGUF is written for this rope or window of {model.name}; leave this peer out")


def _metadata(model: ModelSpec, context: int) -> dict[str, tuple[int, Any]]:
    name = _ARCHITECTURES[model.family][0]
    rope = next(iter(model.ropes.values()))
    found: dict[str, tuple[int, Any]] = {
        "general.architecture": (_STRING, name),
        "general.name": (_STRING, model.name),
        "general.alignment": (_UINT32, ALIGNMENT),
        f"{name}.block_count": (_UINT32, len(model.layers)),
        f"{name}.context_length": (_UINT32, max(context, model.max_positions)),
        f"{name}.embedding_length": (_UINT32, model.hidden_size),
        f"{name}.feed_forward_length": (_UINT32, model.intermediate_size),
        f"{name}.attention.head_count": (_UINT32, model.heads),
        f"{name}.attention.head_count_kv": (_UINT32, model.kv_heads),
        f"{name}.attention.key_length": (_UINT32, model.head_dim),
        f"{name}.attention.value_length": (_UINT32, model.head_dim),
        f"{name}.attention.layer_norm_rms_epsilon": (_FLOAT32, model.norm_epsilon),
        f"{name}.rope.dimension_count": (_UINT32, rope.dim),
        f"{name}.rope.freq_base": (_FLOAT32, rope.theta),
        f"{name}.vocab_size": (_UINT32, model.vocab_size),
        "tokenizer.ggml.model": (_STRING, "none"),
    }
    if rope.kind == "linear":
        found[f"{name}.rope.scaling.type"] = (_STRING, "linear")
        found[f"{name}.rope.scaling.factor"] = (_FLOAT32, rope.factor)
    return found


def _entries(weights: NeutralWeights, context: int) -> Iterator[Entry]:
    model = weights.model
    for tensor in model.tensors():
        yield _entry(weights, tensor, _name_of(model, tensor))
    rope = next(iter(model.ropes.values()))
    if rope.kind == "llama3":
        yield _factors(rope, context)


def _factors(rope: Rope, context: int) -> Entry:
    """By how much each frequency is slowed down."""
    plain, _ = frequencies(Rope(theta=rope.theta, dim=rope.dim), context)
    slowed, _ = frequencies(rope, context)
    values = (np.asarray(plain) / np.asarray(slowed)).astype(np.float32)
    return Entry("rope_freqs.weight", F32, values.shape, lambda: iter([values]))


def _name_of(model: ModelSpec, tensor: Tensor) -> str:
    name, _, kind = tensor.name.rpartition(".")
    plain = name.removeprefix(model.prefix)
    if plain == "embed_tokens":
        return f"token_embd.{kind}"
    if plain == "norm":
        return f"output_norm.{kind}"
    if name == model.head:
        return f"output.{kind}"
    _, index, rest = plain.split(".", 2)
    return f"blk.{index}.{_LAYER[rest]}.{kind}"


def _entry(weights: NeutralWeights, tensor: Tensor, name: str) -> Entry:
    order = _row_order(weights.model, tensor)
    if len(tensor.shape) == 1:

        def vector() -> Iterator[NDArray[Any]]:
            values = weights.floats(tensor.name)
            yield values if order is None else values[order]

        return Entry(name, F32, tensor.shape, vector)
    stored = weights.format_of(tensor.module)
    kind = {"s4": Q4_0, "s8": Q8_0, "float16": F16}.get(stored.kind, F32)
    if kind in (Q4_0, Q8_0) and tensor.shape[1] % BLOCK:
        raise Unsupported(f"llama.cpp: rows of {tensor.shape[1]} values ({name}) are no blocks of {BLOCK}")

    def matrix() -> Iterator[NDArray[Any]]:
        rows = tensor.shape[0]
        if order is not None:
            yield _block_bytes(weights, tensor.module, kind, order)
            return
        for start in range(0, rows, _PIECE_ROWS):
            yield _block_bytes(weights, tensor.module, kind, slice(start, min(rows, start + _PIECE_ROWS)))

    return Entry(name, kind, tensor.shape, matrix)


def _row_order(model: ModelSpec, tensor: Tensor) -> NDArray[np.int64] | None:
    """llama.cpp turns neighbours where we turn the halves of a head: rows of queries and keys change places."""
    if not _ARCHITECTURES[model.family][1] or not tensor.module.endswith(("q_proj", "k_proj")):
        return None
    rows, width = tensor.shape[0], model.head_dim
    return np.arange(rows).reshape(rows // width, 2, width // 2).swapaxes(1, 2).reshape(-1)


def _block_bytes(weights: NeutralWeights, module: str, kind: int, rows: Any) -> NDArray[Any]:
    """Some rows of a matrix as llama.cpp stores them."""
    if kind in (F16, F32):
        floats: NDArray[Any] = weights.dequantised(module)[rows]
        return floats.astype(np.float16 if kind == F16 else np.float32)
    integers, scales = weights.integers(module)[rows], weights.scales(module)[rows]
    blocks = integers.shape[1] // BLOCK
    repeated = np.repeat(scales, blocks // scales.shape[1], axis=1).astype(np.float16)
    values = integers.reshape(-1, blocks, BLOCK)
    if kind == Q4_0:
        raised = (values + 8).astype(np.uint8)
        body = raised[..., : BLOCK // 2] | raised[..., BLOCK // 2 :] << 4
    else:
        body = values.view(np.uint8)
    return np.concatenate([repeated[..., None].view(np.uint8), body], axis=2)


def _header(metadata: Mapping[str, tuple[int, Any]], entries: list[Entry]) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(entries), len(metadata))]
    for key, (kind, value) in metadata.items():
        parts += [_string(key), struct.pack("<I", kind)]
        parts.append(_string(value) if kind == _STRING else struct.pack("<I" if kind == _UINT32 else "<f", value))
    offset = 0
    for entry in entries:
        parts += [_string(entry.name), struct.pack("<I", len(entry.shape))]
        parts.append(struct.pack(f"<{len(entry.shape)}Q", *reversed(entry.shape)))
        parts.append(struct.pack("<IQ", entry.kind, offset))
        offset += -(-entry.bytes // ALIGNMENT) * ALIGNMENT
    return b"".join(parts)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
