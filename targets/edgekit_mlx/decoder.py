"""The forward pass of every exported family in MLX, structured like the reference decoder.

Tokens of all states form one flat array, so that every matrix is read once for all of them; only attention runs state
by state. So nothing is padded, and chunks of any length run together.

mlx-lm's classes are not used: they ignore the windows of four of these families, cannot combine quantised keys with a
softcap, and importing them loads transformers and torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

from edgekit.model.parts import Experts, Layer
from edgekit.model.spec import ModelSpec
from edgekit_mlx.adapters import Delta
from edgekit_mlx.convolution import Carry, gated_convolution
from edgekit_mlx.delta_rule import gated_delta_rule
from edgekit_mlx.kv_cache import LayerCache
from edgekit_mlx.layout import stack_module
from edgekit_mlx.rope import RopeTable, RopeTables, rotate_keys
from edgekit_mlx.weights import MlxMatrix, Weights

_ALIGNED = 64  # a window's first key is a multiple of this, so that sums run in the same order for any chunk


# "causal": each token sees every token up to itself; None: it sees all.
AttentionMask: TypeAlias = mx.array | str | None

# (index of the run, window) → the first key, and the mask.
Masks: TypeAlias = dict[tuple[int, int | None], tuple[int, AttentionMask]]


class Run(NamedTuple):
    """New tokens of one state, after `cached` ones. `next_position` is the rotary position of the first.

    `carried` has the arrays of recurrent layers; a call replaces them by those after `kept` of the tokens.
    """

    caches: Sequence[LayerCache]  # of the layers that store keys and values
    cached: int
    next_position: int
    tokens: int
    carried: dict[int, tuple[mx.array, ...]]
    kept: int


class MlxDecoder:
    """Runs layers over flat tokens, and the head over some of their rows."""

    def __init__(self, model: ModelSpec, weights: Weights, ropes: RopeTables) -> None:
        self._model, self._weights, self._ropes = model, weights, ropes
        self._numbers = weights.numbers
        self._added: Mapping[str, Delta] = {}
        # Gemma's residual stream exceeds float16; it is normalised before every product.
        self._float32_residual = model.post_norms and self._numbers == mx.float16
        self._activate = _ACTIVATIONS[model.activation]
        stored = model.storing_layers
        attending = [index for index, layer in enumerate(model.layers) if not layer.is_recurrent]
        self._cache_of = {index: stored.index(model.kv_owner(index)) for index in attending}

    def body(
        self, ids: Sequence[int], runs: Sequence[Run], layers: Collection[int], added: Mapping[str, Delta] | None = None
    ) -> dict[int, mx.array]:
        """Append every run's tokens to its caches; return hidden states [tokens, hidden] after each of `layers`.

        The last of them ends the call. `added`: an adapter's terms by module, used for all of these tokens.
        """
        self._added = added or {}
        positions = np.concatenate([np.arange(run.next_position, run.next_position + run.tokens) for run in runs])
        tables = self._ropes.tables(positions)
        masks: Masks = {}
        hidden = self.embedded(ids)
        inputs = self._layer_inputs(ids, hidden)
        found = {}
        for index in range(max(layers)):
            hidden = self._layer(index, hidden, runs, tables, masks)
            if inputs is not None:
                hidden = self._add_own_input(f"layers.{index}.", hidden, inputs[:, index])
            if self._model.layer_scalars:
                hidden = hidden * self._weights.norms[f"model.layers.{index}.layer_scalar"].astype(hidden.dtype)
            if index + 1 in layers:
                found[index + 1] = hidden
        return found

    def embedded(self, ids: Sequence[int]) -> mx.array:
        """Return the embeddings [tokens, hidden] that the first layer reads."""
        rows = self._matrix("embed_tokens").rows(mx.array(list(ids)))
        return _scaled(rows.astype(mx.float32) if self._float32_residual else rows, self._model.embedding_scale)

    def head(self, hidden: mx.array) -> mx.array:
        """Return logits [rows, vocabulary] of hidden states, in float32."""
        module = "model.embed_tokens" if self._model.tied else "lm_head"
        normed = _scaled(self._norm(self._model.names.last_norm, hidden), self._model.logit_scale)
        logits = self._weights.matrices[module](normed).astype(mx.float32)
        cap = self._model.logit_softcap
        return logits if cap is None else mx.tanh(logits / cap) * cap

    def _layer(
        self,
        index: int,
        hidden: mx.array,
        runs: Sequence[Run],
        tables: dict[str, RopeTable],
        masks: Masks,
    ) -> mx.array:
        name, scale = f"layers.{index}.", self._model.residual_scale

        def norm(which: str | None, values: mx.array) -> mx.array:
            return values.astype(self._numbers) if which is None else self._norm(f"{name}{which}", values)

        before_attention, after_attention, before_feed, after_feed = self._model.layer_norms()
        normed = norm(before_attention, hidden)
        if self._model.layers[index].is_recurrent:
            mixed = self._recurrent(index, normed, runs)
        else:
            mixed = self._attention(index, normed, runs, tables, masks)
        hidden = hidden + _scaled(norm(after_attention, mixed), scale)
        values, experts = norm(before_feed, hidden), self._model.experts
        if experts and self._model.layers[index].experts:
            fed = self._mixture(name, experts, values)
        else:
            fed = self._feed_forward(name, values)
        return hidden + _scaled(norm(after_feed, fed), scale)

    def _layer_inputs(self, ids: Sequence[int], embedded: mx.array) -> mx.array | None:
        """Return the inputs [tokens, layers, size] that layers have of their own, if they have any."""
        own, table = self._model.per_layer_input, self._weights.layer_inputs
        if own is None or table is None:
            return None
        rows = table.rows(np.array(ids)).reshape(len(ids), -1, own.size) * own.size**0.5
        projected = self._product("per_layer_model_projection", embedded.astype(self._numbers))
        projected = (projected * self._model.hidden_size**-0.5).reshape(rows.shape)
        mixed: mx.array = (self._norm("per_layer_projection_norm", projected) + rows) * 2**-0.5
        return mixed

    def _add_own_input(self, name: str, hidden: mx.array, own: mx.array) -> mx.array:
        gate = self._activate(self._product(f"{name}per_layer_input_gate", hidden.astype(self._numbers)))
        mixed = self._product(f"{name}per_layer_projection", gate * own)
        return hidden + self._norm(f"{name}post_per_layer_input_norm", mixed)

    def _recurrent(self, index: int, normed: mx.array, runs: Sequence[Run]) -> mx.array:
        layer, name = self._model.layers[index], f"layers.{index}."
        before = [Carry(run.tokens, run.kept, run.carried[index]) for run in runs]
        access = (self._product, self._other, normed, before)
        if layer.delta_rule:
            epsilon = self._model.norm_epsilon
            mixed, after = gated_delta_rule(f"{name}linear_attn.", layer.delta_rule, epsilon, *access)
        else:
            mixed, after = gated_convolution(f"{name}conv.", self._model.conv_bias, *access)
        for run, arrays in zip(runs, after, strict=True):
            run.carried[index] = arrays
        return mixed

    def _attention(
        self,
        index: int,
        normed: mx.array,
        runs: Sequence[Run],
        tables: dict[str, RopeTable],
        masks: Masks,
    ) -> mx.array:
        model, layer, name = self._model, self._model.layers[index], f"layers.{index}."
        projected, gate = self._projections(name, layer, normed)
        parts = [part.reshape(len(normed), -1, layer.head_dim) for part in projected]
        if layer.rope is not None:
            parts[:2] = [rotate_keys(part, tables[layer.rope]) for part in parts[:2]]
        if model.norms_after_rope:
            for norm in (model.names.query_norm, model.names.key_norm):
                parts[0] = parts[0] * self._weights.norms[f"model.layers.{index}.{norm}"]
        queries, *stored = (part.swapaxes(0, 1) for part in parts)
        sinks = self._other(f"{name}self_attn.sinks") if model.attention_sinks else None
        outputs, first = [], 0
        for index_of_run, run in enumerate(runs):
            mine = slice(first, first + run.tokens)
            first += run.tokens
            cache = run.caches[self._cache_of[index]]
            if stored:
                cache.append(run.cached, *(part[:, mine] for part in stored))
            if (index_of_run, layer.window) not in masks:
                masks[index_of_run, layer.window] = _visible(run, layer.window)
            start, mask = masks[index_of_run, layer.window]
            stop = run.cached + run.tokens
            mixed = cache.attend(
                queries[:, mine], start, stop, mask, model.attention_scale, model.attention_softcap, sinks
            )
            outputs.append(mixed.swapaxes(0, 1).reshape(run.tokens, -1))
        attended = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        if gate is not None:
            attended = attended * mx.sigmoid(gate)
        return self._product(f"{name}{model.names.output}", attended)

    def _projections(self, name: str, layer: Layer, normed: mx.array) -> tuple[list[mx.array], mx.array | None]:
        """Return queries, keys and values, as far as the layer has its own, and the gate of its output."""
        if self._model.fused_qkv:
            queries, keys, _ = self._model.qkv_widths(layer)
            parts = list(
                mx.split(self._product(f"{name}self_attn.qkv_proj", normed), [queries, queries + keys], axis=-1)
            )
        else:
            parts = [self._product(f"{name}self_attn.{part}", normed) for part in layer.projections]
            parts += parts[1:2] if layer.stores_kv and not layer.has_values else []
        gate: mx.array | None = None
        if self._model.attention_gate:  # each head's gate follows its query
            parts[0], gate = mx.split(parts[0].reshape(len(normed), self._model.heads, -1), 2, axis=-1)
            gate = gate.reshape(len(normed), -1)
        if self._model.qk_norm:
            names = (self._model.names.query_norm, self._model.names.key_norm)
            norms = list(zip(names, self._model.qk_norm_widths(layer), strict=True))
            for index, (norm, width) in enumerate(norms[: len(parts)]):
                by_norm = parts[index].reshape(len(normed), -1, width)
                parts[index] = (
                    mx.fast.rms_norm(by_norm, None, self._model.norm_epsilon)
                    if self._model.norms_after_rope
                    else self._norm(f"{name}{norm}", by_norm)
                )
        if self._model.value_norm and layer.stores_kv:
            values = parts[2].reshape(len(normed), -1, layer.head_dim)
            parts[2] = mx.fast.rms_norm(values, None, self._model.norm_epsilon)
        return parts, gate

    def _feed_forward(self, name: str, normed: mx.array) -> mx.array:
        names = self._model.names
        if self._model.fused_gate_up:
            gate, up = mx.split(self._product(f"{name}mlp.gate_up_proj", normed), 2, axis=-1)
        else:
            gate, up = self._product(f"{name}{names.gate}", normed), self._product(f"{name}{names.up}", normed)
        return self._product(f"{name}{names.down}", self._activate(gate) * up)

    def _mixture(self, name: str, experts: Experts, normed: mx.array) -> mx.array:
        """Return each token's mix of its active experts."""
        scores = (normed @ self._weights.norms[f"model.{name}{experts.router}"].T).astype(mx.float32)
        if experts.linear_bias:
            scores = scores + self._other(f"{name}{experts.router}.bias")
        if experts.scoring == "sigmoid":
            scores = mx.sigmoid(scores)
        ranked = scores + self._weights.norms[f"model.{name}{experts.block}.expert_bias"] if experts.biased else scores
        chosen = mx.argsort(-ranked, axis=-1)[:, : experts.active]
        if experts.scoring == "softmax" and not experts.normalise:
            scores = mx.softmax(scores, axis=-1)
        shares = mx.take_along_axis(scores, chosen, axis=-1)
        if experts.normalise:
            is_softmax = experts.scoring == "softmax"
            shares = mx.softmax(shares, axis=-1) if is_softmax else shares / shares.sum(axis=-1, keepdims=True)
        parts = (stack_module(experts, f"{part}_proj") for part in ("gate", "up", "down"))
        gate, up, down = (self._matrix(f"{name}{part}") for part in parts)
        inputs = normed[:, None, None]
        inner = self._gated(experts, gate.of_experts(inputs, chosen), up.of_experts(inputs, chosen))
        mixed: mx.array = (down.of_experts(inner, chosen)[:, :, 0] * shares[..., None].astype(inner.dtype)).sum(axis=1)
        return mixed

    def _gated(self, experts: Experts, gate: mx.array, up: mx.array) -> mx.array:
        swiglu = experts.swiglu
        if swiglu is None:
            return self._activate(gate) * up  # type: ignore[no-any-return]
        gate, up = mx.minimum(gate, swiglu.limit), mx.clip(up, -swiglu.limit, swiglu.limit)
        return gate * mx.sigmoid(swiglu.alpha * gate) * (up + 1)

    def _norm(self, name: str, values: mx.array) -> mx.array:
        weight = self._weights.norms[f"model.{name}"]
        return mx.fast.rms_norm(values, weight, self._model.norm_epsilon).astype(self._numbers)

    def _product(self, name: str, inputs: mx.array) -> mx.array:
        """Return the product with a module's matrix, plus the adapter's term."""
        product, added = self._matrix(name)(inputs), self._added.get(f"model.{name}")
        return product if added is None else product + added(inputs)

    def _other(self, name: str) -> mx.array:
        return self._weights.others[f"model.{name}"]

    def _matrix(self, name: str) -> MlxMatrix:
        return self._weights.matrices[f"model.{name}"]


def _scaled(values: mx.array, scale: float) -> mx.array:
    return values if scale == 1.0 else values * scale


def _visible(run: Run, window: int | None) -> tuple[int, AttentionMask]:
    """Return the first key that a run's tokens attend to, and the mask from that key on."""
    first = 0 if window is None else max(0, run.cached - window + 1) // _ALIGNED * _ALIGNED
    stop = run.cached + run.tokens
    if run.tokens == 1 and (window is None or stop - first <= window):
        return first, None
    if window is None:
        return first, "causal"
    distance = mx.arange(run.cached, stop)[:, None] - mx.arange(first, stop)[None, :]
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
