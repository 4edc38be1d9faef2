"""The forward pass, for every family that is exported: the same page as the reference decoder, in MLX.

Tokens of all states stand in one flat row, so that every matrix is read once for all of them; only attention goes state
by state, over what each holds. So nothing is padded, and a chunk may have any length beside any other.

mlx-lm's classes are not used: they ignore the windows of four of these families, cannot attend quantised keys under a
softcap, and importing them loads transformers and torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

from edgekit.model import Layer, ModelSpec
from edgekit_mlx.adapters import Added
from edgekit_mlx.cache import LayerCache
from edgekit_mlx.positions import Positions, Table, turned
from edgekit_mlx.weights import Matrix, Weights

_ALIGNED = 64  # a window's first key is rounded down to this, so that sums run in the same order for any chunk


Mask: TypeAlias = mx.array | str | None  # "causal": each token sees everything up to itself; None: everything


Masks: TypeAlias = dict[tuple[int, int | None], tuple[int, Mask]]  # by run and window: the first key, and the mask


class Run(NamedTuple):
    """New tokens of one state, after the `held` ones; the first is turned as position `turned_from`."""

    caches: Sequence[LayerCache]
    held: int
    turned_from: int
    tokens: int


class Decoder:
    """Runs layers over flat tokens, and the head over some of their rows."""

    def __init__(self, model: ModelSpec, weights: Weights, positions: Positions) -> None:
        self._model, self._weights, self._positions = model, weights, positions
        self._numbers = weights.numbers
        self._added: Mapping[str, Added] = {}
        # Gemma's residual outgrows float16; what is normed afterwards does not.
        self._wide = model.post_norms and self._numbers == mx.float16
        self._activate = _ACTIVATIONS[model.activation]

    def body(
        self, ids: Sequence[int], runs: Sequence[Run], stop: int, added: Mapping[str, Added] | None = None
    ) -> mx.array:
        """Hidden states [tokens, hidden] after layer `stop`; every run's tokens are appended to its caches.

        `added`: what an adapter adds to some modules, for all of these tokens.
        """
        self._added = added or {}
        places = np.concatenate([np.arange(run.turned_from, run.turned_from + run.tokens) for run in runs])
        tables = self._positions.tables(places)
        masks: Masks = {}
        hidden = self._matrix("embed_tokens").rows(mx.array(list(ids)))
        if self._wide:
            hidden = hidden.astype(mx.float32)
        if self._model.embedding_scale != 1.0:
            hidden = hidden * self._model.embedding_scale
        for index in range(stop):
            hidden = self._layer(index, hidden, runs, tables, masks)
        return hidden

    def head(self, hidden: mx.array) -> mx.array:
        """Logits of some rows, in float32."""
        module = "model.embed_tokens" if self._model.tied else "lm_head"
        normed = self._norm("norm", hidden)
        logits = self._weights.matrices[module](normed).astype(mx.float32)
        cap = self._model.logit_softcap
        return logits if cap is None else mx.tanh(logits / cap) * cap

    def _layer(
        self,
        index: int,
        hidden: mx.array,
        runs: Sequence[Run],
        tables: dict[str, Table],
        masks: Masks,
    ) -> mx.array:
        model, name = self._model, f"layers.{index}."
        attended = self._attention(index, self._norm(f"{name}input_layernorm", hidden), runs, tables, masks)
        if model.post_norms:
            attended = self._norm(f"{name}post_attention_layernorm", attended)
        hidden = hidden + attended
        before = "pre_feedforward_layernorm" if model.post_norms else "post_attention_layernorm"
        fed = self._feed_forward(f"{name}mlp.", self._norm(f"{name}{before}", hidden))
        if model.post_norms:
            fed = self._norm(f"{name}post_feedforward_layernorm", fed)
        return hidden + fed

    def _attention(
        self,
        index: int,
        normed: mx.array,
        runs: Sequence[Run],
        tables: dict[str, Table],
        masks: Masks,
    ) -> mx.array:
        model, layer, name = self._model, self._model.layers[index], f"layers.{index}.self_attn."
        queries, keys, values = self._projections(name, layer, normed)
        if model.qk_norm:
            queries, keys = self._norm(f"{name}q_norm", queries), self._norm(f"{name}k_norm", keys)
        if layer.rope is not None:
            queries, keys = turned(queries, tables[layer.rope]), turned(keys, tables[layer.rope])
        queries, keys, values = queries.swapaxes(0, 1), keys.swapaxes(0, 1), values.swapaxes(0, 1)
        found, first = [], 0
        for place, run in enumerate(runs):
            mine = slice(first, first + run.tokens)
            first += run.tokens
            cache = run.caches[index]
            cache.append(run.held, keys[:, mine], values[:, mine])
            if (place, layer.window) not in masks:
                masks[place, layer.window] = _visible(run, layer.window)
            start, mask = masks[place, layer.window]
            stop = run.held + run.tokens
            mixed = cache.attend(queries[:, mine], start, stop, mask, model.attention_scale, model.attention_softcap)
            found.append(mixed.swapaxes(0, 1).reshape(run.tokens, -1))
        return self._product(f"{name}o_proj", found[0] if len(found) == 1 else mx.concatenate(found))

    def _projections(self, name: str, layer: Layer, normed: mx.array) -> list[mx.array]:
        if self._model.fused_qkv:
            queries, keys = self._model.heads * layer.head_dim, layer.kv_heads * layer.head_dim
            parts = list(mx.split(self._product(f"{name}qkv_proj", normed), [queries, queries + keys], axis=-1))
        else:
            parts = [self._product(f"{name}{part}_proj", normed) for part in "qkv"]
        return [part.reshape(len(normed), -1, layer.head_dim) for part in parts]

    def _feed_forward(self, name: str, normed: mx.array) -> mx.array:
        if self._model.fused_gate_up:
            gate, up = mx.split(self._product(f"{name}gate_up_proj", normed), 2, axis=-1)
        else:
            gate, up = self._product(f"{name}gate_proj", normed), self._product(f"{name}up_proj", normed)
        return self._product(f"{name}down_proj", self._activate(gate) * up)

    def _norm(self, name: str, values: mx.array) -> mx.array:
        weight = self._weights.norms[f"model.{name}"]
        return mx.fast.rms_norm(values, weight, self._model.norm_epsilon).astype(self._numbers)

    def _product(self, name: str, inputs: mx.array) -> mx.array:
        """What a module says, and what the adapter adds to it."""
        found, added = self._matrix(name)(inputs), self._added.get(f"model.{name}")
        return found if added is None else found + added(inputs)

    def _matrix(self, name: str) -> Matrix:
        return self._weights.matrices[f"model.{name}"]


def _visible(run: Run, window: int | None) -> tuple[int, Mask]:
    """The first key that any of a run's tokens sees, and who sees what from there on."""
    first = 0 if window is None else max(0, run.held - window + 1) // _ALIGNED * _ALIGNED
    stop = run.held + run.tokens
    if run.tokens == 1 and (window is None or stop - first <= window):
        return first, None
    if window is None:
        return first, "causal"
    distance = mx.arange(run.held, stop)[:, None] - mx.arange(first, stop)[None, :]
    return first, (distance >= 0) & (distance < window)


def _silu(values: mx.array) -> mx.array:
    return values * mx.sigmoid(values)


def _gelu(values: mx.array) -> mx.array:
    return values * (1 + mx.erf(values / 2**0.5)) / 2


def _gelu_tanh(values: mx.array) -> mx.array:
    return 0.5 * values * (1 + mx.tanh((2 / np.pi) ** 0.5 * (values + 0.044715 * values**3)))


def _relu2(values: mx.array) -> mx.array:
    return mx.square(mx.maximum(values, 0))


_ACTIVATIONS: dict[str, Callable[[mx.array], Any]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
}
