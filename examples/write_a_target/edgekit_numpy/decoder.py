"""The forward pass of a Llama model over the tokens of one state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from edgekit.model.parts import Layer
from edgekit.model.rope import frequencies
from edgekit.model.spec import ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]


class Decoder:
    """The weights in float32, and the arithmetic over them."""

    def __init__(self, model: ModelSpec, weights: Mapping[str, Floats], context: int) -> None:
        self._model, self._weights = model, weights
        self._ropes = {name: frequencies(rope, context) for name, rope in model.ropes.items()}

    def run(self, tokens: Sequence[int], position: int, keys: Sequence[Floats], values: Sequence[Floats]) -> Floats:
        """Return the hidden states [tokens, hidden]; write each layer's keys and values at `position` and after."""
        model = self._model
        hidden: Floats = self._weight("embed_tokens")[np.asarray(tokens)]
        for index, layer in enumerate(model.layers):
            name = f"layers.{index}."
            normed = self._norm(f"{name}input_layernorm", hidden)
            hidden = hidden + self._attention(f"{name}self_attn.", layer, normed, position, keys[index], values[index])
            normed = self._norm(f"{name}post_attention_layernorm", hidden)
            gate, up = self._linear(f"{name}mlp.gate_proj", normed), self._linear(f"{name}mlp.up_proj", normed)
            hidden = hidden + self._linear(f"{name}mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        return hidden

    def logits(self, hidden: Floats) -> Floats:
        """Return the logits [rows, vocabulary] of some hidden states."""
        head = self._weight("embed_tokens") if self._model.tied else self._weights[f"{self._model.head}.weight"]
        return _product(self._norm("norm", hidden), head)

    def _attention(
        self, name: str, layer: Layer, normed: Floats, position: int, keys: Floats, values: Floats
    ) -> Floats:
        count, end = len(normed), position + len(normed)
        split = (count, -1, layer.head_dim)
        queries = self._rotate(self._linear(f"{name}q_proj", normed).reshape(split), layer, position)
        new_keys = self._rotate(self._linear(f"{name}k_proj", normed).reshape(split), layer, position)
        keys[:, position:end] = new_keys.swapaxes(0, 1)
        values[:, position:end] = self._linear(f"{name}v_proj", normed).reshape(split).swapaxes(0, 1)

        distance = np.arange(position, end)[:, None] - np.arange(end)[None, :]  # [query, key]
        visible = distance >= 0
        if layer.window is not None:
            visible &= distance < layer.window
        # Each head of keys serves several heads of queries: [kv_head, query head of it, token, head_dim].
        grouped = queries.reshape(count, layer.kv_heads, -1, layer.head_dim).transpose(1, 2, 0, 3)
        scores = grouped @ keys[:, None, :end].swapaxes(-1, -2) * np.float32(self._model.attention_scale)
        scores = np.where(visible, scores, np.float32(-np.inf))
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = shares @ values[:, None, :end]
        return self._linear(f"{name}o_proj", mixed.transpose(2, 0, 1, 3).reshape(count, -1))

    def _rotate(self, heads: Floats, layer: Layer, position: int) -> Floats:
        """Turn heads [tokens, heads, head_dim] by their positions, the first half of a head against the second."""
        if layer.rope is None:
            return heads
        inverse, factor = self._ropes[layer.rope]
        angles = np.arange(position, position + len(heads))[:, None] * np.asarray(inverse)
        cosines = (np.cos(angles) * factor).astype(np.float32)[:, None]
        sines = (np.sin(angles) * factor).astype(np.float32)[:, None]
        half = len(inverse)
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return np.concatenate((first * cosines - second * sines, second * cosines + first * sines, rest), axis=-1)

    def _norm(self, name: str, hidden: Floats) -> Floats:
        mean_square = np.mean(np.square(hidden), axis=-1, keepdims=True)
        normed: Floats = hidden / np.sqrt(mean_square + np.float32(self._model.norm_epsilon)) * self._weight(name)
        return normed

    def _linear(self, name: str, inputs: Floats) -> Floats:
        return _product(inputs, self._weight(name))

    def _weight(self, name: str) -> Floats:
        return self._weights[f"{self._model.prefix}{name}.weight"]


def _product(inputs: Floats, matrix: Floats) -> Floats:
    product: Floats = inputs @ matrix.T
    return product
