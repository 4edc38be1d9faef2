"""The stored tensors of a decoder layer, in the order in which the layer uses them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgekit.model import decoder
from edgekit.model.parts import Rope
from edgekit.model.rope import rotated_pairs
from edgekit.model.spec import ModelSpec


def norms_of(spec: ModelSpec) -> list[str]:
    """Return the norms of a layer, in order."""
    of_heads = [spec.names.query_norm, spec.names.key_norm] if spec.qk_norm else []
    before, *others = spec.layer_norms()
    return [norm for norm in (before, *of_heads, *others) if norm is not None]


def modules_of(spec: ModelSpec) -> list[tuple[str, slice | None]]:
    """Every linear of the decoder, the head last."""
    linears = [
        (f"{spec.prefix}layers.{index}.{part.module}", part.rows)
        for index, layer in enumerate(spec.layers)
        for parts in decoder.linears(spec, layer)
        for part in parts
    ]
    return [*linears, (f"{spec.prefix}embed_tokens" if spec.tied else spec.head, None)]


def all_norms_of(spec: ModelSpec) -> list[str]:
    """Every norm of the decoder, the final one last."""
    norms = [f"{spec.prefix}layers.{index}.{norm}" for index in range(len(spec.layers)) for norm in norms_of(spec)]
    return [*norms, f"{spec.prefix}norm"]


def head_dim_of(spec: ModelSpec, rope: str) -> int:
    """Return the head size of the layers that use a rope."""
    sizes = {layer.head_dim for layer in spec.layers if layer.rope == rope}
    return sizes.pop() if sizes else spec.head_dim


def has_windows(spec: ModelSpec, slots: int) -> bool:
    """Return True if a layer attends to fewer tokens than the cache holds."""
    return any(layer.window is not None and layer.window < slots for layer in spec.layers)


def swap_of(rope: Rope, dim: int) -> NDArray[np.float32]:
    """Return the matrix that swaps the two channels of each rotated pair of a head."""
    first, second = rotated_pairs(rope)
    swap = np.eye(dim, dtype=np.float32)
    swap[[*first, *second]] = swap[[*second, *first]]
    return swap


def swaps_of(spec: ModelSpec) -> list[NDArray[np.float32]]:
    """Return the swap matrices of all ropes."""
    return [swap_of(rope, head_dim_of(spec, name)) for name, rope in spec.ropes.items()]
