"""Where factors fold exactly: into a norm before q, k, v or gate and up, into v before o, into up before down."""

from __future__ import annotations

from typing import NamedTuple

from edgekit.quant_methods import ModelSpec


class Fold(NamedTuple):
    """Linears that read the same inputs, and the rows of the tensor that produces those inputs."""

    linears: tuple[str, ...]
    source: str
    rows: slice | None  # rows of the source's matrix; None: the source is a norm
    repeats: int = 1  # heads that share one head of values


def folds_of(spec: ModelSpec, index: int) -> list[Fold]:
    """Return every pair of linears and source in a layer through which factors can be folded."""
    layer, names = spec.layers[index], spec.names
    groups = spec.heads // layer.kv_heads
    queries, keys, _ = spec.qkv_widths(layer)
    before_attention, _, before_feed, _ = spec.layer_norms()
    size = layer.intermediate_size or spec.intermediate_size
    if spec.fused_qkv:
        readers: tuple[str, ...] = ("self_attn.qkv_proj",)
        values = Fold((names.output,), "self_attn.qkv_proj", slice(queries + keys, queries + 2 * keys), groups)
    else:
        readers = tuple(f"self_attn.{name}" for name in layer.projections)
        values = Fold((names.output,), "self_attn.v_proj", slice(0, keys), groups)
    if spec.fused_gate_up:
        gates: tuple[str, ...] = ("mlp.gate_up_proj",)
        up = Fold((names.down,), "mlp.gate_up_proj", slice(size, 2 * size))
    else:
        gates = (names.gate, names.up) if spec.gated else (names.up,)
        up = Fold((names.down,), names.up, slice(0, size))
    if layer.conv_taps:
        # Fold into the second gate: `out_proj` reads a product with these rows of `in_proj`.
        hidden = spec.hidden_size
        readers, values = ("conv.in_proj",), Fold(("conv.out_proj",), "conv.in_proj", slice(hidden, 2 * hidden))
    if layer.delta_rule:
        readers = tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a"))
    together = spec.parallel  # attention and feed-forward read one norm
    norms = (
        [((*readers, *gates), before_attention)] if together else [(readers, before_attention), (gates, before_feed)]
    )
    of_norms = [Fold(linears, norm, None) for linears, norm in norms if norm is not None]
    # `out_proj` of a delta rule has no source to fold into: all heads share the weight of the norm before it. Nor
    # do values that are normalised or come from another layer.
    has_source = not (layer.delta_rule or spec.value_norm)
    of_values = [values] if has_source else []
    # An activation without a gate bends what would be folded into its input.
    return [*of_norms[:1], *of_values, *of_norms[1:], *([up] if spec.gated else [])]
