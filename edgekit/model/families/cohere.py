"""Reads Cohere 2 (Command R7B, Tiny Aya): attention and feed-forward side by side, layer norms, windows."""

from __future__ import annotations

from edgekit.model.families.fields import Fields
from edgekit.model.families.positions import read_rope
from edgekit.model.families.shapes import (
    MAX_LAYERS,
    Defaults,
    alternating,
    read_activation,
    read_kinds,
    read_shapes,
    read_window,
)
from edgekit.model.spec import ModelSpec


def read_cohere2(fields: Fields, name: str) -> ModelSpec:
    """Read Cohere 2: only layers with a window have positions, as neighbouring pairs of values."""
    shapes = read_shapes(fields, Defaults(positions=8192, tied=True))
    window = read_window(fields, 4096)
    pattern = fields.count("sliding_window_pattern", MAX_LAYERS, 4)
    kinds = read_kinds(fields, shapes.layers, alternating(shapes.layers, pattern))
    rope = read_rope(fields, shapes.head_dim, shapes.max_positions)
    bias = fields.flag("attention_bias", False)
    return shapes.spec(
        name,
        "cohere2",
        tuple(shapes.layer(window) if kind == "sliding_attention" else shapes.layer(rope=None) for kind in kinds),
        ropes={"default": rope.model_copy(update={"interleaved": True})},
        norm_epsilon=fields.number("layer_norm_eps", 0.0, 1.0, 1e-5),
        centred_norms=True,
        parallel=True,
        logit_scale=fields.number("logit_scale", 1e-6, 1e6, default=0.0625),
        activation=read_activation(fields, "hidden_act", "silu"),
        qkv_bias=bias,
        output_bias=bias,
    )
