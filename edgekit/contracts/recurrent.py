"""Sizes of a model's recurrent part, shared by the planner and the engines. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

from edgekit.model.parts import Layer
from edgekit.model.spec import ModelSpec

LEAST_TOKENS, MOST_TOKENS = 128, 1 << 14
_FLOAT_BYTES = TOKEN_BYTES = 4


class RecurrentArray(NamedTuple):
    """One array of the recurrent part of a layer; float32."""

    layer: int
    name: str
    shape: tuple[int, ...]


def is_recurrent(model: ModelSpec) -> bool:
    """Return True if a layer of the model is recurrent."""
    return any(layer.is_recurrent for layer in model.layers)


@lru_cache(maxsize=64)
def recurrent_arrays(model: ModelSpec) -> tuple[RecurrentArray, ...]:
    """Return the arrays of a model's recurrent part, layer by layer."""
    return tuple(
        RecurrentArray(index, name, shape)
        for index, layer in enumerate(model.layers)
        for name, shape in _arrays(model, layer)
    )


def _arrays(model: ModelSpec, layer: Layer) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of a layer's arrays: the last inputs of a convolution, and a delta rule's memory."""
    rule = layer.delta_rule
    if layer.conv_taps:
        yield "inputs", (layer.conv_taps - 1, model.hidden_size)
    elif rule:
        yield "inputs", (rule.taps - 1, rule.channels)
        yield "memory", (rule.value_heads, rule.key_dim, rule.value_dim)


def recurrent_shapes(model: ModelSpec) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the arrays of a model's recurrent part, in order."""
    return tuple(array.shape for array in recurrent_arrays(model))


def part_bytes(model: ModelSpec) -> int:
    """Return the bytes of one copy of the recurrent part."""
    return _FLOAT_BYTES * sum(map(prod, recurrent_shapes(model)))


def checkpoint_tokens(model: ModelSpec) -> int | None:
    """Return the number of tokens between checkpoints; None if the model has no recurrent part.

    It is chosen so that a checkpoint takes no more bytes than the float keys and values of the tokens between two of
    them, up to `MOST_TOKENS`.
    """
    needed = part_bytes(model)
    if not needed:
        return None
    per_token = _FLOAT_BYTES * sum(sum(model.qkv_widths(layer)[1:]) for layer in model.layers if layer.stores_kv)
    tokens = LEAST_TOKENS
    while tokens < MOST_TOKENS and tokens * per_token < needed:
        tokens *= 2
    return tokens


def most_checkpoints(spacing: int, capacity_tokens: int) -> int:
    """Return how many checkpoints a state may keep: one for each block edge, and one at another position."""
    return capacity_tokens // spacing + 1


def recurrent_bytes(model: ModelSpec, capacity_tokens: int) -> int:
    """Return the bytes of the recurrent part of a state of `capacity_tokens`, with its checkpoints and tokens."""
    spacing = checkpoint_tokens(model)
    if spacing is None:
        return 0
    copies = 1 + most_checkpoints(spacing, capacity_tokens)
    return copies * part_bytes(model) + TOKEN_BYTES * capacity_tokens
