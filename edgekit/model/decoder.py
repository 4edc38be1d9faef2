"""A decoder, written once for every target: it defines the meaning of each field of a ModelSpec.

`layer` and `head` walk over the operations of a dialect, `Ops`: the torch reference computes them on tensors, the onnx
target writes them into a graph, mlx and ExecuTorch run or trace them. Shapes are the dialect's own; it knows the layer,
so modules and norms have their names within it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, TypeVar

from edgekit.model.parts import DeltaRule, Experts, Layer
from edgekit.model.spec import ModelSpec

Value = TypeVar("Value")

HEAD = "head"  # the name of the head's matrix, tied or not


class Projection(NamedTuple):
    """A linear of a layer, and the module that stores it, alone or as some of its rows."""

    name: str
    module: str
    rows: slice | None = None


class Ops(ABC, Generic[Value]):
    """The operations of one layer, or of the head, in one dialect."""

    @abstractmethod
    def linear(self, x: Value, module: str) -> Value:
        """Return the product with a module's matrix, plus its bias if it has one."""

    @abstractmethod
    def products(self, x: Value, parts: Sequence[Projection], *, may_join: bool = False) -> list[Value]:
        """Return the products of linears that read the same input; one value for all of them if they may be joined."""

    @abstractmethod
    def norm(self, x: Value, name: str | None, heads: tuple[int, int] | None = None) -> Value:
        """Return the norm, of each of `heads` (number, width) if they are given; None: a norm without weights."""

    # Arrays have these operators; a dialect whose values lack them writes its own.
    def add(self, x: Value, y: Value) -> Value:
        return x + y  # type: ignore[operator, no-any-return]

    def multiply(self, x: Value, y: Value) -> Value:
        return x * y  # type: ignore[operator, no-any-return]

    def scale(self, x: Value, factor: float) -> Value:
        return x if factor == 1.0 else x * factor  # type: ignore[operator, return-value]

    @abstractmethod
    def activate(self, x: Value, kind: str) -> Value:
        """Return an activation, by its name in `ModelSpec`, or `sigmoid`."""

    @abstractmethod
    def softcap(self, x: Value, cap: float) -> Value:
        """Return `tanh(x / cap) * cap`."""

    @abstractmethod
    def attend(self, parts: Sequence[Value], late_norms: Sequence[str]) -> Value:
        """Rotate queries and keys, store keys and values, and attend.

        `parts` are queries, keys and values, joined ones in one value, or the queries alone in a layer that reads the
        keys and values of another. The weights of `late_norms` scale rotated queries.
        """

    def add_norm(self, x: Value, y: Value, name: str) -> tuple[Value, Value]:
        """Return the norm of a sum, and the sum."""
        total = self.add(x, y)
        return self.norm(total, name), total

    def split(self, x: Value, count: int) -> Sequence[Value]:
        """Split the last axis into equal parts."""
        raise NotImplementedError

    def split_gate(self, queries: Value) -> tuple[Value, Value]:
        """Return queries and gates, which alternate head by head."""
        raise NotImplementedError

    def experts(self, x: Value, experts: Experts) -> Value:
        """Return each token's mix of its active experts."""
        raise NotImplementedError

    def precise(self, x: Value) -> Value:
        """Return the value in 32 bits, in which recurrent parts are computed."""
        return x

    def convolve(self, x: Value, module: str, taps: int) -> Value:
        """Convolve each channel over its last `taps` tokens; the inputs of earlier ones are a recurrent part."""
        raise NotImplementedError

    def delta_rule(self, rule: DeltaRule, mixed: Value, decay: Value, strength: Value) -> Value:
        """Return the normalised values that queries read from the memory, a recurrent part.

        `mixed` are queries, keys and values.
        """
        raise NotImplementedError

    def own_input(self) -> Value:
        """Return the layer's row of the per-layer inputs."""
        raise NotImplementedError

    def factor(self, x: Value, name: str) -> Value:
        """Return the product with a stored number."""
        raise NotImplementedError


def layer(
    spec: ModelSpec, index: int, ops: Ops[Value], hidden: Value, delta: Value | None = None
) -> tuple[Value, Value | None]:
    """Return the residual stream after layer `index`, and the output of its last part if that is still to be added.

    `hidden` and `delta` come from the layer before; adding late lets a dialect join the sum with a norm.
    """
    kind = spec.layers[index]
    before_mixing, after_mixing, before_feed, after_feed = spec.layer_norms()
    x, hidden = _enter(ops, hidden, delta, before_mixing)
    if kind.delta_rule:
        mixed = _linear_attention(ops, kind.delta_rule, x)
    elif kind.conv_taps:
        mixed = _convolution(ops, kind.conv_taps, x)
    else:
        mixed = _attention(spec, kind, ops, x)
    mixed = _leave(spec, ops, mixed, after_mixing)
    if spec.parallel:
        hidden = ops.add(hidden, mixed)
    else:
        x, hidden = _enter(ops, hidden, mixed, before_feed)
    fed = ops.experts(x, spec.experts) if kind.experts and spec.experts else _feed_forward(spec, kind, ops, x)
    fed = _leave(spec, ops, fed, after_feed)
    if not (spec.per_layer_input or spec.layer_scalars):
        return hidden, fed
    hidden = ops.add(hidden, fed)
    if spec.per_layer_input:
        gate = ops.activate(ops.linear(hidden, "per_layer_input_gate"), spec.activation)
        own = ops.linear(ops.multiply(gate, ops.own_input()), "per_layer_projection")
        hidden = ops.add(hidden, ops.norm(own, "post_per_layer_input_norm"))
    return (ops.factor(hidden, "layer_scalar") if spec.layer_scalars else hidden), None


def head(spec: ModelSpec, ops: Ops[Value], hidden: Value) -> Value:
    """Return logits of the last layer's hidden states."""
    logits = ops.linear(ops.scale(ops.norm(hidden, spec.names.last_norm), spec.logit_scale), HEAD)
    return logits if spec.logit_softcap is None else ops.softcap(logits, spec.logit_softcap)


def layer_inputs(spec: ModelSpec, ops: Ops[Value], embedded: Value, rows: Value) -> Value:
    """Return the inputs of all layers (Gemma 4): their rows of a second embedding, mixed with the first, projected."""
    assert spec.per_layer_input is not None
    size = spec.per_layer_input.size
    projected = ops.scale(ops.linear(embedded, "per_layer_model_projection"), spec.hidden_size**-0.5)
    normed = ops.norm(projected, "per_layer_projection_norm", (len(spec.layers), size))
    return ops.scale(ops.add(normed, ops.scale(rows, size**0.5)), 2**-0.5)


def attention_inputs(spec: ModelSpec, kind: Layer) -> list[Projection]:
    """Return the linears of queries, keys and values, as far as the layer has them."""
    names = [f"self_attn.{name}" for name in kind.projections]
    if not spec.fused_qkv:
        return [Projection(name, name) for name in names]
    ends, stored = accumulate(spec.qkv_widths(kind), initial=0), "self_attn.qkv_proj"
    return [Projection(name, stored, slice(*rows)) for name, rows in zip(names, pairwise(ends), strict=True)]


def feed_forward_inputs(spec: ModelSpec, kind: Layer) -> list[Projection]:
    """Return the linears of the gate and of what it gates, or of what is activated without a gate."""
    width, gate, up = kind.intermediate_size or spec.intermediate_size, spec.names.gate, spec.names.up
    if not spec.fused_gate_up:
        return [Projection(gate, gate), Projection(up, up)] if spec.gated else [Projection(up, up)]
    stored = "mlp.gate_up_proj"
    return [Projection(gate, stored, slice(0, width)), Projection(up, stored, slice(width, 2 * width))]


def linears(spec: ModelSpec, kind: Layer) -> list[list[Projection]]:
    """Return the linears of a layer of attention and a feed-forward in order; those that read one input together."""
    output, down = ([Projection(name, name)] for name in (spec.names.output, spec.names.down))
    return [attention_inputs(spec, kind), output, feed_forward_inputs(spec, kind), down]


def _enter(ops: Ops[Value], hidden: Value, delta: Value | None, norm: str | None) -> tuple[Value, Value]:
    """Add `delta` to the residual stream; return the normalised input of the layer's next part, and the stream."""
    if delta is not None and norm is not None:
        return ops.add_norm(hidden, delta, norm)
    hidden = hidden if delta is None else ops.add(hidden, delta)
    return hidden if norm is None else ops.norm(hidden, norm), hidden


def _leave(spec: ModelSpec, ops: Ops[Value], x: Value, norm: str | None) -> Value:
    """Return the output of a layer's part, normalised and scaled for the residual stream."""
    return ops.scale(x if norm is None else ops.norm(x, norm), spec.residual_scale)


def _attention(spec: ModelSpec, kind: Layer, ops: Ops[Value], x: Value) -> Value:
    names, inputs = spec.names, attention_inputs(spec, kind)
    in_norms = (names.query_norm, names.key_norm) if spec.qk_norm else ()
    parts = ops.products(x, inputs, may_join=not in_norms and not spec.attention_gate and len(inputs) == 3)
    if kind.stores_kv and not kind.has_values:
        parts.append(parts[1])
    if spec.value_norm and kind.stores_kv:
        parts[2] = ops.norm(parts[2], None, (kind.kv_heads, kind.head_dim))
    gate: Value | None = None
    if spec.attention_gate:
        parts[0], gate = ops.split_gate(parts[0])
    for position, name in enumerate(in_norms[: len(parts)]):
        heads = (spec.heads, kind.kv_heads)[position], kind.head_dim
        weights, by_head = None if spec.norms_after_rope else name, spec.qk_norm_span == "head"
        parts[position] = ops.norm(parts[position], weights, heads if by_head else None)
    mixed = ops.attend(parts, in_norms if spec.norms_after_rope else ())
    if gate is not None:
        mixed = ops.multiply(mixed, ops.activate(gate, "sigmoid"))
    return ops.linear(mixed, names.output)


def _convolution(ops: Ops[Value], taps: int, x: Value) -> Value:
    """Mix each channel over its last `taps` tokens, gated before and after (LFM2)."""
    before, after, inputs = ops.split(ops.precise(ops.linear(x, "conv.in_proj")), 3)
    mixed = ops.convolve(ops.multiply(before, inputs), "conv.conv", taps)
    return ops.linear(ops.multiply(after, mixed), "conv.out_proj")


def _linear_attention(ops: Ops[Value], rule: DeltaRule, x: Value) -> Value:
    """Read a memory that each token changes, by the gated delta rule (Qwen3.5)."""
    modules = (f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a"))
    mixed, gate, strength, decay = (ops.precise(ops.linear(x, module)) for module in modules)
    mixed = ops.activate(ops.convolve(mixed, "linear_attn.conv1d", rule.taps), "silu")
    read = ops.delta_rule(rule, mixed, decay, strength)
    return ops.linear(ops.multiply(read, ops.activate(gate, "silu")), "linear_attn.out_proj")


def _feed_forward(spec: ModelSpec, kind: Layer, ops: Ops[Value], x: Value) -> Value:
    first, *others = ops.products(x, feed_forward_inputs(spec, kind))
    fed = ops.activate(first, spec.activation)
    return ops.linear(ops.multiply(fed, others[0]) if others else fed, spec.names.down)
