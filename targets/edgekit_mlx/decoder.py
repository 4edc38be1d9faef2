"""The forward pass of every exported family in MLX: the decoder over MLX's arrays.

Tokens of all states form one flat array, so that every matrix is read once for all of them; only attention runs state
by state. So nothing is padded, and chunks of any length run together.

mlx-lm's classes are not used: they ignore the windows of four of these families, cannot combine quantised keys with a
softcap, and importing them loads transformers and torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

from edgekit.model import decoder
from edgekit.model.parts import DeltaRule, Experts
from edgekit.model.spec import ModelSpec
from edgekit_mlx.adapters import Delta
from edgekit_mlx.convolution import Carry, convolved
from edgekit_mlx.delta_rule import delta_rule
from edgekit_mlx.kv_cache import LayerCache
from edgekit_mlx.layout import stack_module
from edgekit_mlx.rope import RopeTable, RopeTables, rotate_keys
from edgekit_mlx.weights import Weights

_ALIGNED = 64  # a window's first key is a multiple of this, so that sums run in the same order for any chunk
# With more tokens, a layer with the delta rule is computed before the next is described, which takes 9 KB a token.
_MOST_LAZY = 16

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


class _Call(NamedTuple):
    """One call's tokens, rotary tables, and masks."""

    runs: Sequence[Run]
    tables: Mapping[str, RopeTable]
    masks: Masks


class MlxDecoder:
    """Runs layers over flat tokens, and the head over some of their rows."""

    def __init__(self, model: ModelSpec, weights: Weights, ropes: RopeTables) -> None:
        self.model, self.weights, self._ropes = model, weights, ropes
        self._added: Mapping[str, Delta] = {}
        stored = model.storing_layers
        attending = [index for index, layer in enumerate(model.layers) if not layer.is_recurrent]
        self.cache_of = {index: stored.index(model.kv_owner(index)) for index in attending}

    def body(
        self, ids: Sequence[int], runs: Sequence[Run], layers: Collection[int], added: Mapping[str, Delta] | None = None
    ) -> dict[int, mx.array]:
        """Append every run's tokens to its caches; return hidden states [tokens, hidden] after each of `layers`.

        The last of them ends the call. `added`: an adapter's terms by module, used for all of these tokens.
        """
        self._added = added or {}
        positions = np.concatenate([np.arange(run.next_position, run.next_position + run.tokens) for run in runs])
        call = _Call(runs, self._ropes.tables(positions), {})
        hidden = self.embedded(ids)
        inputs: Sequence[mx.array | None] = [None] * len(self.model.layers)
        if self.weights.layer_inputs is not None:
            ops, rows = MlxOps(self), self.weights.layer_inputs.rows(np.array(ids))
            inputs = ops.split(decoder.layer_inputs(self.model, ops, hidden, rows), len(inputs))
        found = {}
        for index in range(max(layers)):
            ops = MlxOps(self, index, call, inputs[index])
            hidden, delta = decoder.layer(self.model, index, ops, hidden)
            hidden = hidden if delta is None else hidden + delta
            if self.model.layers[index].delta_rule and len(ids) > _MOST_LAZY:
                mx.async_eval(hidden, [run.carried[index] for run in runs])  # type: ignore[no-untyped-call]
            if index + 1 in layers:
                found[index + 1] = hidden
        return found

    def embedded(self, ids: Sequence[int]) -> mx.array:
        """Return the embeddings [tokens, hidden] that the first layer reads."""
        rows = self.weights.matrices["model.embed_tokens"].rows(mx.array(list(ids)))
        # Gemma's residual stream exceeds float16; it is normalised before every product.
        in_float32 = self.model.post_norms and self.weights.numbers == mx.float16
        return MlxOps(self).scale(rows.astype(mx.float32) if in_float32 else rows, self.model.embedding_scale)

    def head(self, hidden: mx.array) -> mx.array:
        """Return logits [rows, vocabulary] of hidden states, in float32."""
        return decoder.head(self.model, MlxOps(self), hidden)

    def product(self, module: str, inputs: mx.array) -> mx.array:
        """Return the product with a module's matrix, plus the adapter's term."""
        inputs = inputs.astype(self.weights.numbers)
        product, added = self.weights.matrices[module](inputs), self._added.get(module)
        return product if added is None else product + added(inputs)


class MlxOps(decoder.Ops[mx.array]):
    """Operations of one layer, or of the head, on flat tokens [tokens, width]."""

    def __init__(
        self, owner: MlxDecoder, index: int | None = None, call: _Call | None = None, own: mx.array | None = None
    ) -> None:
        self._owner, self._model, self._weights, self._own = owner, owner.model, owner.weights, own
        self._name = "model." if index is None else f"model.layers.{index}."
        self._index, self._layer, self._call = index or 0, owner.model.layers[index or 0], call or _Call((), {}, {})

    def linear(self, x: mx.array, module: str) -> mx.array:
        if module != decoder.HEAD:
            return self._owner.product(f"{self._name}{module}", x)
        matrix = self._weights.matrices["model.embed_tokens" if self._model.tied else "lm_head"]
        return matrix(x).astype(mx.float32)

    def products(self, x: mx.array, parts: Sequence[decoder.Projection], *, may_join: bool = False) -> list[mx.array]:
        ends = [part.rows.stop for part in parts[:-1] if part.rows is not None]
        if ends:
            return list(mx.split(self.linear(x, parts[0].module), ends, axis=-1))
        return [self.linear(x, part.module) for part in parts]

    def norm(self, x: mx.array, name: str | None, heads: tuple[int, int] | None = None) -> mx.array:
        weight = None if name is None else self._weights.norms[f"{self._name}{name}"]
        by_norm = x if heads is None else x.reshape(len(x), *heads)
        if self._model.centred_norms:
            normed = mx.fast.layer_norm(by_norm, weight, None, self._model.norm_epsilon)
        else:
            normed = mx.fast.rms_norm(by_norm, weight, self._model.norm_epsilon)
        return normed.astype(self._weights.numbers).reshape(x.shape)

    def activate(self, x: mx.array, kind: str) -> mx.array:
        return _ACTIVATIONS[kind](x)

    def softcap(self, x: mx.array, cap: float) -> mx.array:
        return mx.tanh(x / cap) * cap

    def split(self, x: mx.array, count: int) -> Sequence[mx.array]:
        return list(mx.split(x, count, axis=-1))

    def split_gate(self, queries: mx.array) -> tuple[mx.array, mx.array]:
        by_head = queries.reshape(len(queries), self._model.heads, -1)
        heads, gates = (part.reshape(len(queries), -1) for part in mx.split(by_head, 2, axis=-1))
        return heads, gates

    def precise(self, x: mx.array) -> mx.array:
        return x.astype(mx.float32)

    def factor(self, x: mx.array, name: str) -> mx.array:
        return x * self._weights.norms[f"{self._name}{name}"].astype(x.dtype)

    def own_input(self) -> mx.array:
        assert self._own is not None, "the model has per-layer inputs"
        return self._own

    def attend(self, parts: Sequence[mx.array], late_norms: Sequence[str]) -> mx.array:
        model, layer, call, tokens = self._model, self._layer, self._call, len(parts[0])
        by_head = [part.reshape(tokens, -1, layer.head_dim) for part in parts]
        if layer.rope is not None:
            by_head[:2] = [rotate_keys(part, call.tables[layer.rope]) for part in by_head[:2]]
        for norm in late_norms:
            by_head[0] = by_head[0] * self._weights.norms[f"{self._name}{norm}"]
        queries, *stored = (part.swapaxes(0, 1) for part in by_head)
        sinks = self._vector("self_attn.sinks") if model.attention_sinks else None
        outputs, first = [], 0
        for index_of_run, run in enumerate(call.runs):
            mine = slice(first, first + run.tokens)
            first += run.tokens
            cache = run.caches[self._owner.cache_of[self._index]]
            if stored:
                cache.append(run.cached, *(part[:, mine] for part in stored))
            if (index_of_run, layer.window) not in call.masks:
                call.masks[index_of_run, layer.window] = _visible(run, layer.window)
            start, mask = call.masks[index_of_run, layer.window]
            stop = run.cached + run.tokens
            mixed = cache.attend(
                queries[:, mine], start, stop, mask, model.attention_scale, model.attention_softcap, sinks
            )
            outputs.append(mixed.swapaxes(0, 1).reshape(run.tokens, -1))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def convolve(self, x: mx.array, module: str, taps: int) -> mx.array:
        mixed, last = convolved(self._vector(f"{module}.weight"), x, self._carried(0))
        for run, inputs in zip(self._call.runs, last, strict=True):
            run.carried[self._index] = inputs, *run.carried[self._index][1:]
        bias = self._weights.others.get(f"{self._name}{module}.bias")
        return mixed if bias is None else mixed + bias

    def delta_rule(self, rule: DeltaRule, mixed: mx.array, decay: mx.array, strength: mx.array) -> mx.array:
        def vector(name: str) -> mx.array:
            return self._vector(f"linear_attn.{name}")

        read, memories = delta_rule(rule, vector, mixed, decay, strength, self._carried(1))
        for run, memory in zip(self._call.runs, memories, strict=True):
            run.carried[self._index] = run.carried[self._index][0], memory
        return mx.fast.rms_norm(read, vector("norm.weight"), self._model.norm_epsilon).reshape(len(mixed), -1)

    def experts(self, x: mx.array, experts: Experts) -> mx.array:
        norms, name = self._weights.norms, self._name
        scores = (x @ norms[f"{name}{experts.router}"].T).astype(mx.float32)
        if experts.linear_bias:
            scores = scores + self._vector(f"{experts.router}.bias")
        if experts.scoring == "sigmoid":
            scores = mx.sigmoid(scores)
        ranked = scores + norms[f"{name}{experts.block}.expert_bias"] if experts.biased else scores
        chosen = mx.argsort(-ranked, axis=-1)[:, : experts.active]
        if experts.scoring == "softmax" and not experts.normalise:
            scores = mx.softmax(scores, axis=-1)
        shares = mx.take_along_axis(scores, chosen, axis=-1)
        if experts.normalise:
            is_softmax = experts.scoring == "softmax"
            shares = mx.softmax(shares, axis=-1) if is_softmax else shares / shares.sum(axis=-1, keepdims=True)
        stacks = (stack_module(experts, f"{part}_proj") for part in ("gate", "up", "down"))
        gate, up, down = (self._weights.matrices[f"{name}{stack}"] for stack in stacks)
        inputs = x[:, None, None]
        inner = self._gated(experts, gate.of_experts(inputs, chosen), up.of_experts(inputs, chosen))
        mixed: mx.array = (down.of_experts(inner, chosen)[:, :, 0] * shares[..., None].astype(inner.dtype)).sum(axis=1)
        return mixed

    def _gated(self, experts: Experts, gate: mx.array, up: mx.array) -> mx.array:
        swiglu = experts.swiglu
        if swiglu is None:
            return self.activate(gate, self._model.activation) * up
        gate, up = mx.minimum(gate, swiglu.limit), mx.clip(up, -swiglu.limit, swiglu.limit)
        return gate * mx.sigmoid(swiglu.alpha * gate) * (up + 1)

    def _carried(self, position: int) -> list[Carry]:
        return [Carry(run.tokens, run.kept, run.carried[self._index][position]) for run in self._call.runs]

    def _vector(self, name: str) -> mx.array:
        return self._weights.others[f"{self._name}{name}"]


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


_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": lambda values: mx.square(mx.maximum(values, 0)),
    "sigmoid": mx.sigmoid,
}
