"""Reads GLM-4 and GLM-Edge: ropes that rotate neighbouring pairs of half a head, and fused gates."""

from __future__ import annotations

from edgekit.model.families.fields import Fields
from edgekit.model.families.positions import read_rope
from edgekit.model.families.shapes import Defaults, read_activation, read_shapes
from edgekit.model.spec import ModelSpec


def read_glm(fields: Fields, name: str) -> ModelSpec:
    """Read GLM-4 of 2024 and GLM-Edge."""
    shapes = read_shapes(fields, Defaults(positions=131_072, epsilon=1.5625e-7, kv_heads=2, head_dim=128))
    rope = read_rope(fields, shapes.head_dim, shapes.max_positions, partial=0.5)
    return shapes.spec(
        name,
        "glm",
        (shapes.layer(),) * shapes.layers,
        ropes={"default": rope.model_copy(update={"interleaved": True})},
        activation=read_activation(fields, "hidden_act", "silu"),
        qkv_bias=fields.flag("attention_bias", True),
        fused_gate_up=True,
    )


def read_glm4(fields: Fields, name: str) -> ModelSpec:
    """Read GLM-4 of 2025: as before, with norms after attention and feed-forward too."""
    return read_glm(fields, name).model_copy(update={"family": "glm4", "post_norms": True, "naming": "glm4"})
