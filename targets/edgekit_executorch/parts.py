"""Which stored tensors a layer of the decoder is made of, in the order in which it uses them. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgekit.model import Layer, ModelSpec

LINEARS = ("q", "k", "v", "o", "gate", "up", "down")


def part_of(spec: ModelSpec, layer: Layer, which: str) -> tuple[str, slice | None]:
    """Where a matrix of a layer is stored: its module, and its rows where several are stored as one."""
    queries, keys, feed = spec.heads * layer.head_dim, layer.kv_heads * layer.head_dim, spec.intermediate_size
    if spec.fused_qkv and which in "qkv":
        starts = {"q": (0, queries), "k": (queries, queries + keys), "v": (queries + keys, queries + 2 * keys)}
        return "self_attn.qkv_proj", slice(*starts[which])
    if spec.fused_gate_up and which in ("gate", "up"):
        return "mlp.gate_up_proj", slice(0, feed) if which == "gate" else slice(feed, 2 * feed)
    return f"self_attn.{which}_proj" if which in "qkvo" else f"mlp.{which}_proj", None


def norms_of(spec: ModelSpec) -> list[str]:
    """The norms of a layer."""
    of_heads = ["self_attn.q_norm", "self_attn.k_norm"] if spec.qk_norm else []
    around = ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if spec.post_norms else []
    return ["input_layernorm", *of_heads, "post_attention_layernorm", *around]


def modules_of(spec: ModelSpec) -> list[tuple[str, slice | None]]:
    """Every linear of the decoder."""
    found = [
        (f"{spec.prefix}layers.{index}.{module}", rows)
        for index, layer in enumerate(spec.layers)
        for module, rows in (part_of(spec, layer, which) for which in LINEARS)
    ]
    return [*found, (f"{spec.prefix}embed_tokens" if spec.tied else spec.head, None)]


def all_norms_of(spec: ModelSpec) -> list[str]:
    """Every norm of the decoder."""
    found = [f"{spec.prefix}layers.{index}.{norm}" for index in range(len(spec.layers)) for norm in norms_of(spec)]
    return [*found, f"{spec.prefix}norm"]


def head_dim_of(spec: ModelSpec, rope: str) -> int:
    """The size of the heads that a rope turns, which is one for all its layers."""
    sizes = {layer.head_dim for layer in spec.layers if layer.rope == rope}
    return sizes.pop() if sizes else spec.head_dim


def has_windows(spec: ModelSpec, slots: int) -> bool:
    """Whether a layer sees less than everything that is held."""
    return any(layer.window is not None and layer.window < slots for layer in spec.layers)


def swap_of(dim: int, turned: int) -> NDArray[np.float32]:
    """The matrix that lets the halves of a head's first `turned` values change places."""
    swap = np.eye(dim, dtype=np.float32)
    swap[:turned] = np.roll(swap[:turned], turned // 2, axis=0)
    return swap


def swaps_of(spec: ModelSpec) -> list[NDArray[np.float32]]:
    """Those of all ropes."""
    return [swap_of(head_dim_of(spec, name), 2 * (rope.dim // 2)) for name, rope in spec.ropes.items()]
