"""Reads the plain decoders: Llama, Mistral, Qwen2, Qwen3, SmolLM3 and Phi-3."""

from __future__ import annotations

from edgekit.model.families.fields import Fields
from edgekit.model.families.shapes import (
    MAX_LAYERS,
    Defaults,
    Shapes,
    read_kinds,
    read_shapes,
    read_switched_window,
    read_window,
)
from edgekit.model.parts import Layer
from edgekit.model.spec import ModelSpec


def read_llama(fields: Fields, name: str) -> ModelSpec:
    """Read Llama 2 and 3.x, SmolLM2 and others of model_type llama."""
    shapes = read_shapes(fields, Defaults(positions=2048))
    return shapes.spec(name, "llama", **shapes.biases(), mlp_bias=fields.flag("mlp_bias", False))


def read_mistral(fields: Fields, name: str) -> ModelSpec:
    """Read Mistral: one window for every layer, 4096 by default; null means none."""
    shapes = read_shapes(fields, Defaults(positions=131_072, kv_heads=8))
    window = read_window(fields, 4096)
    kinds = read_kinds(fields, shapes.layers, ("sliding_attention",) * shapes.layers)
    mixed = window is not None and "full_attention" in kinds
    return shapes.spec(
        name,
        "mistral",
        shapes.layers_of(kinds, window),
        exportable="layer_types differ, which model_type mistral ignores when it runs; is it a ministral?"
        if mixed
        else None,
    )


def read_qwen2(fields: Fields, name: str) -> ModelSpec:
    """Read Qwen2: biases on q, k and v; with `use_sliding_window`, layers from `max_window_layers` on are windowed."""
    shapes = read_shapes(fields, Defaults(positions=32_768, kv_heads=32))
    return shapes.spec(name, "qwen2", _qwen_layers(fields, shapes), qkv_bias=True)


def read_qwen3(fields: Fields, name: str) -> ModelSpec:
    """Read Qwen3: as Qwen2, with norms on q and k instead of the biases."""
    shapes = read_shapes(fields, Defaults(positions=32_768, kv_heads=32, head_dim=128))
    return shapes.spec(name, "qwen3", _qwen_layers(fields, shapes), qk_norm=True, **shapes.biases())


def _qwen_layers(fields: Fields, shapes: Shapes) -> tuple[Layer, ...]:
    window = read_switched_window(fields, 4096)
    first = fields.count("max_window_layers", MAX_LAYERS, 28, least=0)
    default = tuple("sliding_attention" if index >= first else "full_attention" for index in range(shapes.layers))
    kinds = read_kinds(fields, shapes.layers, default)
    return shapes.layers_of(kinds, window)


def read_smollm3(fields: Fields, name: str) -> ModelSpec:
    """Read SmolLM3: every fourth layer, or those marked 0 in `no_rope_layers`, has no rope."""
    shapes = read_shapes(fields, Defaults(positions=32_768, kv_heads=4, tied=True))
    interval = fields.count("no_rope_layer_interval", MAX_LAYERS, 4)
    default = tuple(int((index + 1) % interval != 0) for index in range(shapes.layers))
    turns = fields.counts_by_layer("no_rope_layers", shapes.layers, most=1) or default
    window = read_switched_window(fields)
    kinds = read_kinds(
        fields, shapes.layers, tuple("full_attention" if turn else "sliding_attention" for turn in turns)
    )
    return shapes.spec(
        name,
        "smollm3",
        tuple(
            shapes.layer(window if kind == "sliding_attention" else None, rope="default" if turn else None)
            for kind, turn in zip(kinds, turns, strict=True)
        ),
        rope=shapes.rope(theta=2_000_000.0),
        **shapes.biases(),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def read_phi3(fields: Fields, name: str) -> ModelSpec:
    """Read Phi-3 and Phi-4-mini: fused projections, possibly partial rotary heads."""
    shapes = read_shapes(fields, Defaults(positions=4096, epsilon=1e-5))
    return shapes.spec(
        name,
        "phi3",
        (shapes.layer(read_window(fields)),) * shapes.layers,
        rope=shapes.rope(partial=1.0, original=4096),
        fused_qkv=True,
        fused_gate_up=True,
    )
