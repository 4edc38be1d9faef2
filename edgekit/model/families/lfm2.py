"""Reads LFM2 and LFM2.5: gated short convolutions, and attention in some layers."""

from __future__ import annotations

from edgekit.model.families.fields import Fields
from edgekit.model.families.shapes import MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, Defaults, Shapes, read_shapes
from edgekit.model.parts import Layer
from edgekit.model.spec import ModelSpec

_MAX_TAPS = 64


def read_lfm2(fields: Fields, name: str) -> ModelSpec:
    """Read LFM2: each layer is a convolution over a few tokens or attention, by `layer_types` or `full_attn_idxs`."""
    size = _one_of(fields, "intermediate_size", "block_ff_dim", MAX_INTERMEDIATE)
    tied = fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True))
    shapes = read_shapes(
        fields.changed(intermediate_size=size, tie_word_embeddings=tied), Defaults(positions=128_000, kv_heads=8)
    )
    _refuse_other_shapes(fields, shapes)
    bias = fields.flag("conv_bias", False)
    shapes = shapes._replace(
        norm_epsilon=fields.number("norm_eps", 0.0, 1.0, fields.number("block_norm_eps", 0.0, 1.0, 1e-5)),
        intermediate_size=_adjusted(fields, shapes.intermediate_size),
    )
    return shapes.spec(
        name,
        "lfm2",
        _layers(fields, shapes),
        rope=shapes.rope(theta=1_000_000.0),
        activation="silu",
        qk_norm=True,
        conv_bias=bias,
        naming="lfm2",
    )


def _one_of(fields: Fields, usual: str, other: str, most: int) -> int:
    """Return a size with two possible names; both may occur if they agree."""
    values = {key: value for key in (usual, other) if (value := fields.maybe_count(key, most)) is not None}
    if not values:
        raise fields.missing(usual)
    if len(set(values.values())) > 1:
        raise fields.refusal(other, f"differs from {usual}, {values[usual]}; correct the file")
    return next(iter(values.values()))


def _refuse_other_shapes(fields: Fields, shapes: Shapes) -> None:
    """Refuse sizes under older names that contradict the usual ones, and disabled switches of mandatory parts."""
    for key, expected in (
        ("block_dim", shapes.hidden_size),
        ("conv_dim", shapes.hidden_size),
        ("conv_dim_out", shapes.hidden_size),
        ("num_heads", shapes.heads),
    ):
        if fields.count(key, MAX_HIDDEN, expected) != expected:
            raise fields.unsupported(key, f"is not {expected}, the size that the model has; correct the file")
    for key in ("block_use_swiglu", "use_pos_enc"):
        if not fields.flag(key, True):
            raise fields.unsupported(key, "is not supported; only true is")


def _adjusted(fields: Fields, size: int) -> int:
    """Return the feed-forward size: two thirds of the stated one, rounded up to a multiple, unless disabled."""
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = fields.count("block_multiple_of", MAX_INTERMEDIATE, 256)
    size = int(fields.number("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def _layers(fields: Fields, shapes: Shapes) -> tuple[Layer, ...]:
    everywhere = tuple(range(shapes.layers))
    attending = fields.counts("full_attn_idxs", MAX_LAYERS) or everywhere
    default = tuple("full_attention" if index in attending else "conv" for index in everywhere)
    kinds = fields.choices("layer_types", shapes.layers, ("full_attention", "conv")) or default
    if "full_attention" not in kinds:
        raise fields.unsupported("layer_types", "has no layer of attention, which is not supported")
    taps = fields.count("conv_L_cache", _MAX_TAPS, 3, least=2)
    return tuple(
        shapes.layer() if kind == "full_attention" else shapes.layer(rope=None, stores_kv=False, conv_taps=taps)
        for kind in kinds
    )
