"""Reads BERT-like encoders, and renames their tensors as in decoders."""

from __future__ import annotations

import re
from typing import Literal

from edgekit.model.families.fields import Fields
from edgekit.model.families.shapes import MAX_VOCAB, Defaults, read_activation, read_shapes
from edgekit.model.parts import Encoder, Reranking
from edgekit.model.spec import ModelSpec

# Module in a checkpoint → module in the spec.
_MODULES = {
    "embeddings.word_embeddings": "embed_tokens",
    "embeddings.position_embeddings": "embed_positions",
    "embeddings.token_type_embeddings": "embed_types",
    "embeddings.LayerNorm": "embed_norm",
    "pooler.dense": "pooler.dense",
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
# Tensors outside the encoder: heads for training, a pooler without a classifier, and a buffer of older libraries.
BESIDE = re.compile(r"model\.pooler\.dense\.(?:weight|bias)|(?:bert\.)?embeddings\.position_ids|cls\..*", re.ASCII)
_CLASSIFIER = "BertForSequenceClassification"
_ACTIVATIONS: dict[str, Literal["sigmoid", "identity"]] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "identity",
}


def read_bert(fields: Fields, name: str) -> ModelSpec:
    """Read BERT and its relatives (MiniLM, BGE, E5, GTE): bidirectional attention, learned positions."""
    shapes = read_shapes(fields, Defaults(positions=512))
    for field, wanted in (("position_embedding_type", "absolute"), ("is_decoder", False)):
        if fields.get(field) not in (None, wanted):
            raise fields.unsupported(field, f"is not supported; supported: {wanted}")
    activation = read_activation(fields, "hidden_act", "gelu")
    if activation not in ("gelu", "gelu_tanh"):
        raise fields.unsupported("hidden_act", "is not supported; supported: gelu, gelu_new, gelu_pytorch_tanh")
    classifies = _is_reranker(fields)
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
        encoder=Encoder(
            positions=shapes.max_positions,
            token_types=fields.count("type_vocab_size", MAX_VOCAB, 2),
            classifier=classifies,
        ),
        reranking=Reranking(kind="classifier", activation=_activation(fields)) if classifies else None,
    )


def _is_reranker(fields: Fields) -> bool:
    """Return True for a classifier with one label. Others are refused: their logits are no scores."""
    kinds = fields.get("architectures")
    if not isinstance(kinds, list) or _CLASSIFIER not in kinds:
        return False
    labels = fields.get("id2label")
    count = len(labels) if isinstance(labels, dict) else fields.count("num_labels", MAX_VOCAB, 2)
    if count != 1:
        raise fields.unsupported("architectures", f"with {count} labels is not supported; rerankers have one label")
    return True


def _activation(fields: Fields) -> Literal["sigmoid", "identity"]:
    """Return what sentence-transformers applies to the logit, from the fields of its newer and older releases."""
    section = fields.section("sentence_transformers")
    older = read_score_activation(fields, "sbert_ce_default_activation_function")
    if section is None:
        return older or "sigmoid"
    section.get("version")
    return read_score_activation(section, "activation_fn") or older or "sigmoid"


def read_score_activation(fields: Fields, field: str) -> Literal["sigmoid", "identity"] | None:
    """Return the activation of scores that a field names by its class in torch; None if it is absent."""
    if fields.get(field) is None:
        return None
    found = _ACTIVATIONS.get(fields.text(field))
    if found is None:
        raise fields.unsupported(field, f"is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return found


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
