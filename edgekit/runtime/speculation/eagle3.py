"""The forward pass of an EAGLE-3 head: one layer over embeddings and hidden states, with mapped weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edgekit.model.eagle3 import Eagle3Weights
from edgekit.model.rope import frequencies, rotated_pairs
from edgekit.planner.head_memory import BLOCK_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]


class HeadCache:
    """The head's keys and values of one request: those of the newest tokens, at any positions."""

    def __init__(self, kv_heads: int, head_dim: int, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.keys = np.empty((kv_heads, capacity, head_dim), np.float32)
        self.values = np.empty_like(self.keys)

    def reserve(self, count: int) -> None:
        """Make room for `count` tokens. A full cache drops its older half, so that tokens are rarely moved."""
        if self.length + count > self.capacity:
            kept = min(self.length, self.capacity - count, self.capacity // 2)
            for array in (self.keys, self.values):
                array[:, :kept] = array[:, self.length - kept : self.length].copy()
            self.length = kept

    def append(self, keys: Floats, values: Floats) -> None:
        stop = self.length + keys.shape[1]
        self.keys[:, self.length : stop], self.values[:, self.length : stop] = keys, values
        self.length = stop


class Eagle3Decoder:
    """A head that runs. Its matrices are views of the file; norms and the map of its vocabulary are copies."""

    def __init__(self, head: Eagle3Weights) -> None:
        assert head.spec.own_embedding, "sealing a head adds the target's embedding"
        self.spec, self.targets, self._embed = head.spec, head.targets, head.rows
        self._head = head
        self._weights = {
            name: head.tensors.array(head.stored[name])
            if head.tensors.entry(head.stored[name]).dtype == "F32" and len(shape) == 2
            else head.floats(name)
            for name, shape in head.spec.tensors()
        }
        layer = head.spec.layer
        self._rope = layer.ropes[layer.layers[0].rope or "default"]
        inverse, self._rope_scale = frequencies(self._rope, layer.max_positions)
        self._inverse = np.asarray(inverse, np.float64)
        self._pairs = tuple(map(np.asarray, rotated_pairs(self._rope)))

    def start(self, capacity: int) -> HeadCache:
        """Return an empty cache of `capacity` tokens, at most the head's window."""
        layer = self.spec.layer.layers[0]
        return HeadCache(layer.kv_heads, layer.head_dim, min(capacity, self.spec.window or capacity))

    def combine(self, hidden: Floats) -> Floats:
        """Project the target's concatenated hidden states to the head's inputs [tokens, width]."""
        if self.spec.norm_before_fc:
            hidden = self._norm(hidden, "input_norm.weight")
        if self.spec.fc_norm:
            parts = np.split(hidden, len(self.spec.hidden_layers), axis=1)
            hidden = np.concatenate(
                [self._norm(part, f"fc_norm.{index}.weight") for index, part in enumerate(parts)], axis=1
            )
        return self._linear(hidden, "fc")

    def forward(
        self, cache: HeadCache, tokens: NDArray[np.int64], inputs: Floats, positions: NDArray[np.int64]
    ) -> Floats:
        """Append tokens to the cache; return the layer's outputs, which are the inputs for the next drafted tokens."""
        outputs = []
        for start in range(0, len(tokens), min(BLOCK_TOKENS, cache.capacity)):
            part = slice(start, start + min(BLOCK_TOKENS, cache.capacity))
            outputs.append(self._block(cache, tokens[part], inputs[part], positions[part]))
        return np.concatenate(outputs)

    def logits(self, output: Floats) -> Floats:
        """Return the logits [draft vocabulary] after one token."""
        normed = output if self.spec.norm_output else self._norm(output[None], "norm.weight")[0]
        logits: Floats = self._weights["lm_head.weight"] @ normed
        return logits

    def close(self) -> None:
        self._weights.clear()
        self._head.close()

    def _block(
        self, cache: HeadCache, tokens: NDArray[np.int64], inputs: Floats, positions: NDArray[np.int64]
    ) -> Floats:
        embedded = self._norm(self._embed(tokens), "layers.0.input_layernorm.weight")
        normed = self._norm(inputs, "layers.0.hidden_norm.weight")
        residual = normed if self.spec.norm_before_residual else inputs
        hidden = residual + self._attention(cache, np.concatenate([embedded, normed], axis=1), positions)
        x = self._norm(hidden, "layers.0.post_attention_layernorm.weight")
        gate, up = self._linear(x, "layers.0.mlp.gate_proj"), self._linear(x, "layers.0.mlp.up_proj")
        hidden = hidden + self._linear(_silu(gate) * up, "layers.0.mlp.down_proj")
        return self._norm(hidden, "norm.weight") if self.spec.norm_output else hidden

    def _attention(self, cache: HeadCache, x: Floats, positions: NDArray[np.int64]) -> Floats:
        layer, count = self.spec.layer.layers[0], len(x)
        heads, kv_heads, width = self.spec.layer.heads, layer.kv_heads, layer.head_dim
        query, key, value = (self._linear(x, f"layers.0.self_attn.{kind}_proj") for kind in "qkv")
        angles = positions[:, None].astype(np.float64) * self._inverse
        cosines, sines = ((self._rope_scale * curve(angles)).astype(np.float32)[:, None] for curve in (np.cos, np.sin))
        query = self._rotated(self._head_norm(query.reshape(count, heads, width), "q_norm"), cosines, sines)
        key = self._rotated(self._head_norm(key.reshape(count, kv_heads, width), "k_norm"), cosines, sines)
        cache.reserve(count)
        before = cache.length
        cache.append(key.transpose(1, 0, 2), value.reshape(count, kv_heads, width).transpose(1, 0, 2))
        # Queries of one group of heads share keys, and are rows of one product.
        grouped = query.reshape(count, kv_heads, -1, width).transpose(1, 2, 0, 3).reshape(kv_heads, -1, width)
        scores = (
            grouped @ cache.keys[:, : cache.length].transpose(0, 2, 1) * np.float32(self.spec.layer.attention_scale)
        )
        if count > 1:
            later = np.arange(cache.length) > before + np.arange(count)[:, None]
            scores.reshape(kv_heads, -1, count, cache.length)[:, :, later] = -np.inf
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = (scores @ cache.values[:, : cache.length]).reshape(kv_heads, -1, count, width)
        return self._linear(mixed.transpose(2, 0, 1, 3).reshape(count, heads * width), "layers.0.self_attn.o_proj")

    def _rotated(self, x: Floats, cosines: Floats, sines: Floats) -> Floats:
        first, second = self._pairs
        one, other = x[:, :, first], x[:, :, second]
        turned = x.copy()
        turned[:, :, first] = one * cosines - other * sines
        turned[:, :, second] = other * cosines + one * sines
        return turned

    def _head_norm(self, x: Floats, name: str) -> Floats:
        return self._norm(x, f"layers.0.self_attn.{name}.weight") if self.spec.layer.qk_norm else x

    def _norm(self, x: Floats, name: str) -> Floats:
        scale = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(self.spec.layer.norm_epsilon))
        normed: Floats = x / scale * self._weights[name]
        return normed

    def _linear(self, x: Floats, module: str) -> Floats:
        product: Floats = x @ self._weights[f"{module}.weight"].T
        bias = self._weights.get(f"{module}.bias")
        return product if bias is None else product + bias


def _silu(x: Floats) -> Floats:
    with np.errstate(over="ignore"):
        silu: Floats = x / (1 + np.exp(-x))
    return silu
