"""Reads the sizes of an unsupported family through optimum's field names, for plans only."""

from __future__ import annotations

from typing import Any

from edgekit.errors import quote_short
from edgekit.model.families.fields import Fields
from edgekit.model.families.shapes import MAX_INTERMEDIATE, Defaults, read_shapes
from edgekit.model.spec import ModelSpec

_GENERATES = ("ForCausalLM", "LMHeadModel")
_NORMALIZED = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
_SPELLINGS = {
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}


def planned_from_shapes(
    config: dict[str, Any], names: dict[str, str], name: str, where: str, supported: str
) -> ModelSpec:
    """Return a spec for estimating sizes only; it assumes gated feed-forwards and full attention.

    `names` maps `hidden_size`, `num_layers`, `num_attention_heads` and `vocab_size` to the family's names.
    """
    fields = Fields(config, where)
    architectures = fields.get("architectures")
    if isinstance(architectures, list) and not any(str(item).endswith(_GENERATES) for item in architectures):
        raise fields.unsupported("architectures", "is not a language model that generates text")
    usual = {key: names.get(own, key) for key, own in _NORMALIZED.items()}
    values = {key: config.get(stated, config.get(key)) for key, stated in usual.items()}
    values |= {key: config.get(key) for key in ("head_dim", "tie_word_embeddings", "bos_token_id", "eos_token_id")}
    for key, spellings in _SPELLINGS.items():
        values[key] = next((config[spelling] for spelling in spellings if config.get(spelling) is not None), None)
    hidden = values["hidden_size"]
    if values["intermediate_size"] is None and isinstance(hidden, int) and hidden > 0:
        values["intermediate_size"] = min(4 * hidden, MAX_INTERMEDIATE)
    present = {key: value for key, value in values.items() if value is not None}
    shapes = read_shapes(fields.with_values(present), Defaults(positions=2048, epsilon=1e-5, tied=True))
    family = fields.text("model_type")
    return shapes.spec(
        name,
        family,
        (shapes.layer(rope=None),) * shapes.layers,
        ropes={},
        activation="silu",
        exportable=(
            f"model_type {quote_short(family)} is sized by the few shapes that optimum knows of it, so bytes are "
            f"approximate; export supports {supported}"
        ),
    )


def names_of_sizes(normalized: Any, aliases: dict[str, str]) -> dict[str, str]:
    """Return config field names by size, such as `num_layers`, from optimum's class and transformers' aliases."""
    described = getattr(normalized, "func", normalized)
    attributes = {key.lower(): getattr(described, key) for key in dir(described) if key.isupper()}
    attributes |= getattr(normalized, "keywords", {})
    return {key: aliases.get(value, value) for key, value in attributes.items() if isinstance(value, str)}
