"""The forward pass of a drafting head: one layer over embeddings and hidden states, with mapped weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edgekit.drafters import HeadWeights
from edgekit.methods.drafters.head_arithmetic import HeadArithmetic, HeadRope

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.methods.drafters.head_arithmetic import Embed

    Floats = NDArray[np.float32]


class HeadCache:
    """The head's keys and values of one request: the newest tokens', at any positions.

    `embed` returns the embeddings of its tokens.
    """

    def __init__(self, kv_heads: int, head_dim: int, capacity: int, embed: Embed) -> None:
        self.capacity, self.length, self.embed = capacity, 0, embed
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


class HeadDecoder(HeadArithmetic):
    """A head of one layer that runs: an EAGLE-3 head or an MTP part."""

    def __init__(self, head: HeadWeights) -> None:
        super().__init__(head)
        layer = head.spec.layer
        if layer.norm_offset:  # norms are stored without the 1 that is added to them
            norms = (name for name, shape in head.spec.tensors() if len(shape) == 1 and name.endswith(".weight"))
            self._weights |= {name: self._weights[name] + np.float32(1) for name in norms}
        self._rope = HeadRope(layer, layer.layers[0].rope or "default")

    def start(self, capacity: int, embed: Embed | None = None) -> HeadCache:
        """Return an empty cache of `capacity` tokens, at most the head's window.

        A head without embeddings needs `embed`, which looks them up in the target.
        """
        layer, most = self.spec.layer.layers[0], min(capacity, self.spec.window or capacity)
        embed = (lambda tokens: self._head.rows(np.array(tokens))) if self.spec.own_embedding else embed
        assert embed is not None, "this head has no embeddings"
        return HeadCache(layer.kv_heads, layer.head_dim, most, embed)

    def combine(self, hidden: Floats) -> Floats:
        """Turn the target's concatenated hidden states into the head's inputs [tokens, width]."""
        if self.spec.kind == "mtp":
            return self._norm(hidden, "target_norm.weight")
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
        outputs, most = [], min(self.spec.block_tokens, cache.capacity)
        for start in range(0, len(tokens), most):
            part = slice(start, start + most)
            outputs.append(self._block(cache, tokens[part], inputs[part], positions[part]))
        return np.concatenate(outputs)

    def logits(self, output: Floats) -> Floats:
        """Return the logits [draft vocabulary] after one token."""
        normed = output if self.spec.norm_output else self._norm(output[None], "norm.weight")[0]
        logits: Floats = self._weights["lm_head.weight"] @ normed
        return logits

    def _block(
        self, cache: HeadCache, tokens: NDArray[np.int64], inputs: Floats, positions: NDArray[np.int64]
    ) -> Floats:
        residual, x = self._joined(cache.embed(tokens.tolist()), inputs)
        hidden = residual + self._attention(cache, x, positions)
        x = self._norm(hidden, "layers.0.post_attention_layernorm.weight")
        gate, up = self._linear(x, "layers.0.mlp.gate_proj"), self._linear(x, "layers.0.mlp.up_proj")
        hidden = hidden + self._linear(_silu(gate) * up, "layers.0.mlp.down_proj")
        return self._norm(hidden, "norm.weight") if self.spec.norm_output else hidden

    def _joined(self, embedded: Floats, inputs: Floats) -> tuple[Floats, Floats]:
        """Join embeddings and inputs; return the residual, and the input of queries, keys and values."""
        if self.spec.kind == "mtp":
            embedded = self._norm(embedded, "pre_fc_norm_embedding.weight")
            both = np.concatenate([embedded, self._norm(inputs, "pre_fc_norm_hidden.weight")], axis=1)
            residual = self._linear(both, "fc")
            return residual, self._norm(residual, "layers.0.input_layernorm.weight")
        embedded = self._norm(embedded, "layers.0.input_layernorm.weight")
        normed = self._norm(inputs, "layers.0.hidden_norm.weight")
        residual = normed if self.spec.norm_before_residual else inputs
        return residual, np.concatenate([embedded, normed], axis=1)

    def _attention(self, cache: HeadCache, x: Floats, positions: NDArray[np.int64]) -> Floats:
        layer, count = self.spec.layer.layers[0], len(x)
        heads, kv_heads, width = self.spec.layer.heads, layer.kv_heads, layer.head_dim
        query, key, value = (self._linear(x, f"layers.0.self_attn.{kind}_proj") for kind in "qkv")
        gate = None
        if self.spec.layer.attention_gate:  # each head's queries, then its gate
            query, gate = np.split(query.reshape(count, heads, 2 * width), 2, axis=-1)
        turns = self._rope.turns(positions)
        query = self._rope.turned(self._head_norm(query.reshape(count, heads, width), "q_norm"), turns)
        key = self._rope.turned(self._head_norm(key.reshape(count, kv_heads, width), "k_norm"), turns)
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
        mixed = mixed.transpose(2, 0, 1, 3).reshape(count, heads * width)
        if gate is not None:
            mixed = mixed * _sigmoid(gate.reshape(count, heads * width))
        return self._linear(mixed, "layers.0.self_attn.o_proj")

    def _head_norm(self, x: Floats, name: str) -> Floats:
        return self._norm(x, f"layers.0.self_attn.{name}.weight") if self.spec.layer.qk_norm else x


def _silu(x: Floats) -> Floats:
    return x * _sigmoid(x)


def _sigmoid(x: Floats) -> Floats:
    with np.errstate(over="ignore"):
        sigmoid: Floats = np.reciprocal(1 + np.exp(-x))
    return sigmoid
