"""Reads decoders that differ from Llama in a few ways: Granite, AFM, OLMo, EXAONE, ERNIE, Hunyuan, GLM and others."""

from __future__ import annotations

from typing import Any

from edgekit.model.families.dense import read_llama
from edgekit.model.families.fields import Fields
from edgekit.model.families.positions import read_ropes_by_kind
from edgekit.model.families.shapes import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    Defaults,
    Shapes,
    alternating,
    read_activation,
    read_kinds,
    read_shapes,
    read_window,
)
from edgekit.model.spec import ModelSpec

_SCALE = (1e-6, 1e6)


def read_granite(fields: Fields, name: str) -> ModelSpec:
    """Read Granite 3 and 4 (dense): Llama with factors on embeddings, scores, residuals and logits."""
    factors = {
        "embedding_scale": fields.number("embedding_multiplier", *_SCALE, default=1.0),
        "attention_scale": fields.number("attention_multiplier", *_SCALE, default=1.0),
        "residual_scale": fields.number("residual_multiplier", *_SCALE, default=1.0),
        "logit_scale": 1 / fields.number("logits_scaling", *_SCALE, default=1.0),
    }
    return read_llama(fields, name).model_copy(update={"family": "granite", **factors})


def read_arcee(fields: Fields, name: str) -> ModelSpec:
    """Read AFM: Llama with a squared ReLU that gates nothing."""
    shapes = read_shapes(fields, Defaults(positions=4096, epsilon=1e-5))
    return shapes.spec(
        name,
        "arcee",
        activation=read_activation(fields, "hidden_act", "relu2"),
        gated=False,
        **shapes.biases(),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def read_olmo2(fields: Fields, name: str) -> ModelSpec:
    """Read OLMo 2: norms only after attention and feed-forward, and over all heads of q and k together."""
    shapes = read_shapes(fields, Defaults(positions=2048, epsilon=1e-5))
    return shapes.spec(name, "olmo2", **_olmo(shapes))


def read_olmo3(fields: Fields, name: str) -> ModelSpec:
    """Read OLMo 3: OLMo 2 with three windowed layers per global one; only global layers have a scaled rope."""
    shapes = read_shapes(fields, Defaults(positions=2048, epsilon=1e-5))
    window = read_window(fields, 4096)
    kinds = read_kinds(fields, shapes.layers, alternating(shapes.layers, 4))
    return shapes.spec(
        name,
        "olmo3",
        tuple(shapes.layer_of(kind, window) for kind in kinds),
        ropes=read_ropes_by_kind(
            fields, shapes.head_dim, shapes.head_dim, shapes.max_positions, theta=500_000.0, local_theta=None
        ),
        **_olmo(shapes),
    )


def _olmo(shapes: Shapes) -> dict[str, Any]:
    return {
        "qk_norm": True,
        "qk_norm_span": "layer",
        "pre_norms": False,
        "post_norms": True,
        **shapes.biases(),
    }


def read_exaone4(fields: Fields, name: str) -> ModelSpec:
    """Read EXAONE 4: OLMo 2's norms, but per head; in models with windows, only windowed layers have rope."""
    shapes = read_shapes(fields, Defaults(positions=2048, epsilon=1e-5, kv_heads=32))
    window = read_window(fields, 4096)
    everything = ("full_attention",) * shapes.layers
    kinds = read_kinds(fields, shapes.layers, everything if window is None else _exaone4_pattern(fields, shapes.layers))
    return shapes.spec(
        name,
        "exaone4",
        tuple(
            shapes.layer(window, rope="default")
            if kind == "sliding_attention"
            else shapes.layer(rope="default" if window is None else None)
            for kind in kinds
        ),
        qk_norm=True,
        pre_norms=False,
        post_norms=True,
    )


def _exaone4_pattern(fields: Fields, layers: int) -> tuple[str, ...]:
    """Return the kinds of layers from a period, or from letters such as LLLG; the last layer is always global."""
    letters = fields.get("sliding_window_pattern")
    if not isinstance(letters, str):
        return alternating(layers, fields.count("sliding_window_pattern", MAX_LAYERS, 4))
    if not letters or set(letters) - {"L", "G"}:
        raise fields.refusal("sliding_window_pattern", "holds other letters than L and G; correct the file")
    kinds = [
        "sliding_attention" if letters[index % len(letters)] == "L" else "full_attention" for index in range(layers)
    ]
    return (*kinds[:-1], "full_attention")


def read_ernie4_5(fields: Fields, name: str) -> ModelSpec:
    """Read ERNIE 4.5 (dense): Llama with interleaved rope."""
    defaults = Defaults(positions=131_072, epsilon=1e-5, tied=True, kv_heads=2, head_dim=128)
    shapes = read_shapes(fields, defaults)
    bias = fields.flag("use_bias", False)
    return shapes.spec(
        name,
        "ernie4_5",
        rope=shapes.rope(theta=500_000.0, interleaved=True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


_HUNYUAN_SWITCHES = {
    "use_qk_norm": True, "use_rotary_pos_emb": True, "use_cla": False, "mlp_bias": False,
    "add_classification_head": False, "position_embedding_xdrope": False,
}  # fmt: skip


def read_hunyuan(fields: Fields, name: str) -> ModelSpec:
    """Read Hunyuan (dense): norms over each head of q and k after the rope, whose theta an `alpha` raises."""
    for switch, usual in _HUNYUAN_SWITCHES.items():
        if fields.flag(switch, usual) is not usual:
            raise fields.unsupported(switch, "is not supported in this family")
    shapes = read_shapes(fields, Defaults(positions=2048, epsilon=1e-5))
    if fields.count("attention_head_dim", MAX_HEAD_DIM, shapes.head_dim) != shapes.head_dim:
        raise fields.refusal("attention_head_dim", f"is not the head_dim, {shapes.head_dim}; keep the right one")
    return shapes.spec(
        name,
        "hunyuan_v1_dense",
        rope=shapes.rope(alpha=True),
        qk_norm=True,
        norms_after_rope=True,
        naming="hunyuan",
        **shapes.biases(),
    )


def read_ministral3(fields: Fields, name: str) -> ModelSpec:
    """Read Ministral 3: Mistral that scales queries at positions beyond the trained ones.

    Within the trained positions the factor is one, so the context is limited to them.
    """
    shapes = read_shapes(fields, Defaults(positions=262_144, epsilon=1e-5, kv_heads=8, head_dim=128))
    rope = shapes.rope(theta=1_000_000.0)
    section = fields.section("rope_parameters") or fields.section("rope_scaling")
    if section is None:
        raise fields.missing("rope_parameters")
    growth = section.number("llama_4_scaling_beta", 0.0, 1e3, default=0.0)
    if growth and rope.original_positions is not None:
        shapes = shapes._replace(max_positions=min(shapes.max_positions, rope.original_positions))
    return shapes.spec(name, "ministral3", (shapes.layer(read_window(fields)),) * shapes.layers, rope=rope)


def read_glm(fields: Fields, name: str) -> ModelSpec:
    """Read GLM-4 of 2024 and GLM-Edge."""
    shapes = read_shapes(fields, Defaults(positions=131_072, epsilon=1.5625e-7, kv_heads=2, head_dim=128))
    return shapes.spec(
        name,
        "glm",
        rope=shapes.rope(partial=0.5, interleaved=True),
        qkv_bias=fields.flag("attention_bias", True),
        fused_gate_up=True,
    )


def read_glm4(fields: Fields, name: str) -> ModelSpec:
    """Read GLM-4 of 2025: as before, with norms after attention and feed-forward too."""
    return read_glm(fields, name).model_copy(update={"family": "glm4", "post_norms": True, "naming": "glm4"})


def read_cohere2(fields: Fields, name: str) -> ModelSpec:
    """Read Cohere 2: only layers with a window have positions, as neighbouring pairs of values."""
    shapes = read_shapes(fields, Defaults(positions=8192, tied=True))
    window = read_window(fields, 4096)
    pattern = fields.count("sliding_window_pattern", MAX_LAYERS, 4)
    kinds = read_kinds(fields, shapes.layers, alternating(shapes.layers, pattern))
    return shapes.spec(
        name,
        "cohere2",
        tuple(shapes.layer(window) if kind == "sliding_attention" else shapes.layer(rope=None) for kind in kinds),
        rope=shapes.rope(interleaved=True),
        norm_epsilon=fields.number("layer_norm_eps", 0.0, 1.0, 1e-5),
        centred_norms=True,
        parallel=True,
        logit_scale=fields.number("logit_scale", 1e-6, 1e6, default=0.0625),
        **shapes.biases(),
    )
