"""Reads BERT-like encoders, and renames their tensors as in decoders."""

from __future__ import annotations

import re

from edgekit.model.families.fields import Fields
from edgekit.model.families.shapes import MAX_VOCAB, Defaults, read_activation, read_shapes
from edgekit.model.parts import Encoder
from edgekit.model.spec import ModelSpec

# Module in a checkpoint → module in the spec.
_MODULES = {
    "embeddings.word_embeddings": "embed_tokens",
    "embeddings.position_embeddings": "embed_positions",
    "embeddings.token_type_embeddings": "embed_types",
    "embeddings.LayerNorm": "embed_norm",
}
_LAYER_MODULES = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "post_attention_layernorm",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
    "output.LayerNorm": "post_feedforward_layernorm",
}
_NAME = re.compile(
    r"(?:bert\.)?(?:encoder\.layer\.(?P<layer>\d+)\.)?(?P<module>[\w.]+)\.(?P<kind>weight|bias)", re.ASCII
)
# Tensors beside the encoder: heads for training and classification, and a buffer of older libraries.
BESIDE = re.compile(r"(?:bert\.)?(?:pooler\.dense\.(?:weight|bias)|embeddings\.position_ids)|cls\..*", re.ASCII)


def read_bert(fields: Fields, name: str) -> ModelSpec:
    """Read BERT and its relatives (MiniLM, BGE, E5, GTE): bidirectional attention, learned positions."""
    shapes = read_shapes(fields, Defaults(positions=512))
    for field, wanted in (("position_embedding_type", "absolute"), ("is_decoder", False)):
        if fields.get(field) not in (None, wanted):
            raise fields.unsupported(field, f"is not supported; supported: {wanted}")
    activation = read_activation(fields, "hidden_act", "gelu")
    if activation not in ("gelu", "gelu_tanh"):
        raise fields.unsupported("hidden_act", "is not supported; supported: gelu, gelu_new, gelu_pytorch_tanh")
    return shapes.spec(
        name,
        "bert",
        (shapes.layer(rope=None),) * shapes.layers,
        ropes={},
        norm_epsilon=fields.number("layer_norm_eps", 0.0, 1.0, 1e-12),
        activation=activation,
        pre_norms=False,
        post_norms=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied=False,
        encoder=Encoder(positions=shapes.max_positions, token_types=fields.count("type_vocab_size", MAX_VOCAB, 2)),
    )


def name_of(stored: str) -> str:
    """Return the spec's name of a checkpoint's tensor; unchanged if it is not part of the encoder."""
    match = _NAME.fullmatch(stored)
    if match is None:
        return stored
    layer, names = match["layer"], _MODULES if match["layer"] is None else _LAYER_MODULES
    if match["module"] not in names:
        return stored
    where = "" if layer is None else f"layers.{layer}."
    return f"model.{where}{names[match['module']]}.{match['kind']}"
