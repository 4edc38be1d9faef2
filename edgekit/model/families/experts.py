"""Reads mixtures of experts: Mixtral, Qwen3-MoE, LFM2-MoE and gpt-oss."""

from __future__ import annotations

from edgekit.model.families.fields import Fields
from edgekit.model.families.lfm2 import read_lfm2
from edgekit.model.families.positions import MAX_POSITIONS, read_rope
from edgekit.model.families.shapes import (
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    Defaults,
    alternating,
    read_kinds,
    read_shapes,
    read_switched_window,
    read_window,
)
from edgekit.model.parts import ClampedSwiglu, Experts
from edgekit.model.spec import ModelSpec

MAX_EXPERTS = 1 << 10


def read_experts(fields: Fields, count: int, active: int, size: int, layout: str) -> Experts:
    """Return the sizes of a mixture, checked against each other."""
    if active > count:
        raise fields.refusal("num_experts_per_tok", f"is more than the {count} experts there are; correct the file")
    return Experts.model_validate({"count": count, "active": active, "intermediate_size": size, "layout": layout})


def read_mixtral(fields: Fields, name: str) -> ModelSpec:
    """Read Mixtral: every layer a mixture; attention as in Mistral, by default without a window."""
    shapes = read_shapes(fields, Defaults(positions=131_072, kv_heads=8, epsilon=1e-5))
    experts = read_experts(
        fields,
        fields.count("num_local_experts", MAX_EXPERTS, 8),
        fields.count("num_experts_per_tok", MAX_EXPERTS, 2),
        shapes.intermediate_size,
        "w1w2w3",
    )
    return shapes.spec(
        name,
        "mixtral",
        (shapes.layer(read_window(fields), experts=True),) * shapes.layers,
        rope=shapes.rope(theta=1_000_000.0),
        experts=experts,
    )


def read_qwen3_moe(fields: Fields, name: str) -> ModelSpec:
    """Read Qwen3-MoE: mixtures every `decoder_sparse_step` layers, except those in `mlp_only_layers`."""
    shapes = read_shapes(fields, Defaults(positions=32_768, kv_heads=4))
    counted = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    experts = read_experts(
        fields,
        fields.count(counted, MAX_EXPERTS, 128),
        fields.count("num_experts_per_tok", MAX_EXPERTS, 8),
        fields.count("moe_intermediate_size", MAX_INTERMEDIATE, 768),
        "separate",
    )
    dense = fields.counts("mlp_only_layers", MAX_LAYERS) or ()
    step = fields.count("decoder_sparse_step", MAX_LAYERS, 1)
    window = read_switched_window(fields, 4096)
    return shapes.spec(
        name,
        "qwen3_moe",
        tuple(
            shapes.layer(window, experts=index not in dense and (index + 1) % step == 0)
            for index in range(shapes.layers)
        ),
        experts=experts.model_copy(update={"normalise": fields.flag("norm_topk_prob", False)}),
        qk_norm=True,
        **shapes.biases(),
    )


def read_lfm2_moe(fields: Fields, name: str) -> ModelSpec:
    """Read LFM2-MoE: LFM2 with mixtures after the first `num_dense_layers`, chosen by sigmoids and a bias."""
    dense = read_lfm2(fields.changed(block_auto_adjust_ff_dim=False), name)
    if fields.number("routed_scaling_factor", 0.0, 1e6, 1.0) != 1.0:
        raise fields.unsupported("routed_scaling_factor", "is not supported; only 1.0 is")
    experts = read_experts(
        fields,
        fields.count("num_experts", MAX_EXPERTS, 32),
        fields.count("num_experts_per_tok", MAX_EXPERTS, 4),
        fields.count("moe_intermediate_size", MAX_INTERMEDIATE, 1792),
        "feed_forward",
    )
    biased, normalise = fields.flag("use_expert_bias", True), fields.flag("norm_topk_prob", True)
    first = fields.count("num_dense_layers", MAX_LAYERS, 2, least=0)
    layers = [layer.model_copy(update={"experts": index >= first}) for index, layer in enumerate(dense.layers)]
    changes = {"scoring": "sigmoid", "biased": biased, "normalise": normalise}
    return dense.model_copy(
        update={"family": "lfm2_moe", "layers": tuple(layers), "experts": experts.model_copy(update=changes)}
    )


# The rope of a config that names none; the published files say the same.
_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def read_gpt_oss(fields: Fields, name: str) -> ModelSpec:
    """Read gpt-oss: every layer a mixture with biases and a clamped SwiGLU, windows in every second layer, sinks."""
    shapes = read_shapes(fields, Defaults(positions=131_072, kv_heads=8, head_dim=64, epsilon=1e-5))
    experts = read_experts(
        fields,
        fields.count("num_local_experts", MAX_EXPERTS, 128),
        fields.count("num_experts_per_tok", MAX_EXPERTS, 4),
        shapes.intermediate_size,
        "stacks",
    )
    if fields.count("experts_per_token", MAX_EXPERTS, experts.active) != experts.active:
        reason = f"contradicts num_experts_per_tok, {experts.active}; keep the right one"
        raise fields.refusal("experts_per_token", reason)
    if not (fields.section("rope_scaling") or fields.section("rope_parameters")):
        fields = fields.changed(rope_scaling=_GPT_OSS_ROPE)
    rope = read_rope(fields, shapes.head_dim, shapes.max_positions, theta=150_000.0, original=4096)
    trained = fields.maybe_count("initial_context_length", MAX_POSITIONS)
    if trained is not None and rope.original_positions not in (None, trained):
        raise fields.refusal(
            "initial_context_length",
            f"contradicts the rope's original positions, {rope.original_positions}; keep the right one",
        )
    window, bias = read_window(fields, 128), fields.flag("attention_bias", True)
    kinds = read_kinds(fields, shapes.layers, alternating(shapes.layers, 2))
    swiglu = ClampedSwiglu(
        alpha=fields.number("swiglu_alpha", 1e-3, 1e3, 1.702), limit=fields.number("swiglu_limit", 1e-3, 1e6, 7.0)
    )
    return shapes.spec(
        name,
        "gpt_oss",
        tuple(shapes.layer(window if kind == "sliding_attention" else None, experts=True) for kind in kinds),
        rope=rope,
        experts=experts.model_copy(update={"linear_bias": True, "swiglu": swiglu}),
        attention_sinks=True,
        qkv_bias=bias,
        output_bias=bias,
    )
