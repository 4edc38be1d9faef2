"""The forward pass of Gemma 4's assistant: one token through a few layers that attend to the target's cache.

Every query has the position of the text's newest token, which is not in the cache yet, also for drafted tokens:
what they see of the text is what the target has read, and all they know of each other is in the hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edgekit.drafters import HeadWeights
from edgekit.methods.drafters.head_arithmetic import HeadArithmetic, HeadRope

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.contracts.engine import CachedKV, State
    from edgekit.methods.drafters.head_arithmetic import Embed

    Floats = NDArray[np.float32]
    ReadKV = Callable[[int, int, int], CachedKV]


class CachedText(NamedTuple):
    """The part of a text that the target has cached: the methods and properties of its state."""

    read: ReadKV
    embed: Embed  # tokens, as the target's first layer reads them
    length: int  # tokens
    next_position: int  # of the token that follows the cached ones

    @staticmethod
    def of(state: State) -> CachedText:
        return CachedText(state.cached, state.embedded, state.length, state.next_position)


class AssistantOutput(NamedTuple):
    """The results of one token: the hidden state that the next one reads, and the one that its logits follow from."""

    hidden: Floats  # [target's width]
    normed: Floats  # [width]


class AssistantDecoder(HeadArithmetic):
    """An assistant that runs. It has no cache."""

    def __init__(self, head: HeadWeights) -> None:
        super().__init__(head)
        model = head.spec.layer
        self._ropes = {name: HeadRope(model, name) for name in model.ropes}

    def combine(self, hidden: Floats) -> Floats:
        """Norm the target's hidden states [tokens, width], as its own head reads them."""
        return self._norm(hidden, "target_norm.weight")

    def forward(self, seen: CachedText, token: int, hidden: Floats) -> AssistantOutput:
        """Feed a token and the hidden state before it: the target's, or the assistant's at the drafted token before."""
        x = self._linear(np.concatenate([seen.embed([token])[0], hidden])[None], "pre_projection")
        for index in range(len(self.spec.layer.layers)):
            x = self._layer(seen, index, x)
        normed = self._norm(x, "norm.weight")
        return AssistantOutput(self._linear(normed, "post_projection")[0], normed[0])

    def logits(self, normed: Floats) -> Floats:
        """Return the logits [draft vocabulary] after a token; -inf in clusters that are not read."""
        rows, clusters = self._weights["lm_head.weight"], self.spec.clusters
        if clusters is None:
            logits: Floats = rows @ normed
            return logits
        size, count = len(rows) // clusters, self.spec.active_clusters or 1
        likeliest = np.argpartition(self._weights["centroids.weight"] @ normed, -count)[-count:]
        logits = np.full((clusters, size), -np.inf, np.float32)
        logits[likeliest] = rows.reshape(clusters, size, -1)[likeliest].astype(np.float32) @ normed
        return logits.reshape(-1)

    def _layer(self, seen: CachedText, index: int, x: Floats) -> Floats:
        name, model = f"layers.{index}", self.spec.layer
        before_attention, after_attention, before_feed, after_feed = model.layer_norms()
        attended = self._attention(seen, index, self._norm(x, f"{name}.{before_attention}.weight"))
        x = x + self._norm(attended, f"{name}.{after_attention}.weight")
        fed = self._norm(x, f"{name}.{before_feed}.weight")
        gate, up = self._linear(fed, f"{name}.mlp.gate_proj"), self._linear(fed, f"{name}.mlp.up_proj")
        fed = self._linear(_gelu(gate) * up, f"{name}.mlp.down_proj")
        x = x + self._norm(fed, f"{name}.{after_feed}.weight")
        scaled: Floats = x * self._weights[f"{name}.layer_scalar"]
        return scaled

    def _attention(self, seen: CachedText, index: int, x: Floats) -> Floats:
        """Attend with one token to the cached ones, a few at a time; a larger score scales earlier shares down."""
        model, layer, name = self.spec.layer, self.spec.layer.layers[index], f"layers.{index}.self_attn"
        query = self._linear(x, f"{name}.q_proj").reshape(1, model.heads, layer.head_dim)
        query = self._norm(query, f"{name}.q_norm.weight")
        if layer.rope is not None:
            rope = self._ropes[layer.rope]
            query = rope.turned(query, rope.turns(np.array([seen.next_position])))
        query = query.reshape(layer.kv_heads, -1, layer.head_dim) * np.float32(model.attention_scale)
        most, total, mixed = np.float32(-np.inf), np.float32(0), np.float32(0)
        for kv in self._pieces(seen, index):
            scores = query @ kv.keys.transpose(0, 2, 1)
            larger = np.maximum(most, scores.max(axis=-1, keepdims=True))
            shares, kept = np.exp(scores - larger), np.exp(most - larger)
            total = total * kept + shares.sum(axis=-1, keepdims=True)
            mixed, most = mixed * kept + shares @ kv.values, larger
        return self._linear((mixed / total).reshape(1, -1), f"{name}.o_proj")

    def _pieces(self, seen: CachedText, index: int) -> Iterator[CachedKV]:
        """Yield the keys and values that a layer attends to. A sliding one sees its window and one token more."""
        window, start = self.spec.layer.layers[index].window, 0
        if window is not None:
            start = max(0, seen.length - window - 1)
        for first in range(start, seen.length, self.spec.read_tokens):
            yield seen.read(self.spec.kv_layers[index], first, min(first + self.spec.read_tokens, seen.length))


def _gelu(x: Floats) -> Floats:
    """Return the approximation of GELU by a hyperbolic tangent."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)
    activated: Floats = np.float32(0.5) * x * (1 + np.tanh(inner))
    return activated
