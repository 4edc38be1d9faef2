"""Reads the text models of Qwen3.5 and 3.6: gated delta rule, and gated attention in every fourth layer."""

from __future__ import annotations

import re

from edgekit.model.families.fields import Fields
from edgekit.model.families.positions import MAX_POSITIONS, read_rope
from edgekit.model.families.shapes import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, Defaults, read_activation, read_shapes
from edgekit.model.parts import DeltaRule, Rope
from edgekit.model.spec import ModelSpec

_MAX_TAPS = 64
# The multi-token prediction head and the vision tower, which some checkpoints of the text model contain.
BESIDE = re.compile(r"mtp\..*|model\.visual\..*", re.ASCII)


def read_qwen3_5(fields: Fields, name: str) -> ModelSpec:
    """Read Qwen3.5: `layer_types` or `full_attention_interval` decide which layers have attention."""
    shapes = read_shapes(fields, Defaults(positions=32_768, kv_heads=4, heads=16, head_dim=256))
    _refuse_other_parts(fields)
    rule = _delta_rule(fields)
    interval = fields.count("full_attention_interval", MAX_LAYERS, 4)
    kinds = fields.choices("layer_types", shapes.layers, ("full_attention", "linear_attention")) or tuple(
        "linear_attention" if (index + 1) % interval else "full_attention" for index in range(shapes.layers)
    )
    if "full_attention" not in kinds:
        raise fields.unsupported("layer_types", "has no layer of attention, which is not supported")
    return shapes.spec(
        name,
        "qwen3_5_text",
        tuple(
            shapes.layer() if kind == "full_attention" else shapes.layer(rope=None, stores_kv=False, delta_rule=rule)
            for kind in kinds
        ),
        ropes={"default": _rope(fields, shapes.head_dim, shapes.max_positions)},
        qk_norm=True,
        norm_offset=True,
        attention_gate=True,
        **shapes.biases(),
    )


def _refuse_other_parts(fields: Fields) -> None:
    """Refuse switches that disable parts of every published model."""
    for key, only in (("attn_output_gate", True), ("output_gate_type", "swish"), ("mlp_only_layers", [])):
        if fields.get(key) not in (None, only):
            raise fields.unsupported(key, f"is not supported; only {only} is")
    # `hidden_act` is also the activation of the convolution and of the gate after the delta rule.
    if read_activation(fields, "hidden_act", "silu") != "silu":
        raise fields.unsupported("hidden_act", "is not supported in this family; only silu is")


def _delta_rule(fields: Fields) -> DeltaRule:
    key_heads = fields.count("linear_num_key_heads", MAX_HEADS, 16)
    value_heads = fields.count("linear_num_value_heads", MAX_HEADS, 32)
    if value_heads % key_heads:
        raise fields.refusal(
            "linear_num_value_heads", f"is not a multiple of the {key_heads} key heads; correct the file"
        )
    return DeltaRule(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=fields.count("linear_key_head_dim", MAX_HEAD_DIM, 128),
        value_dim=fields.count("linear_value_head_dim", MAX_HEAD_DIM, 128),
        taps=fields.count("linear_conv_kernel_dim", _MAX_TAPS, 4, least=2),
    )


def _rope(fields: Fields, head_dim: int, max_positions: int) -> Rope:
    """Read the rope, which covers a quarter of each head by default.

    Its sections for image axes are ignored: a text token has the same position on every axis.
    """
    share = {} if fields.has("partial_rotary_factor") else {"partial_rotary_factor": 0.25}
    ropes = {}
    for spelling in ("rope_parameters", "rope_scaling"):
        section = fields.section(spelling)
        if section is not None:
            section.counts("mrope_section", MAX_POSITIONS)
            section.flag("mrope_interleaved", True)
            stated = {key: section.get(key) for key in section.names() if not key.startswith("mrope_")}
            ropes[spelling] = share | stated
    return read_rope(fields.changed(**(ropes or {"rope_parameters": share})), head_dim, max_positions, partial=1.0)
