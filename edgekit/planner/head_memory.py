"""Predicts the bytes of a sealed drafting head: its mapped weights and its file."""

from __future__ import annotations

from math import prod

from edgekit.contracts.memory import Term, sized
from edgekit.contracts.target import Offer
from edgekit.model.head_spec import HEAD, HeadSpec
from edgekit.model.spec import ModelSpec

_PAGE_BYTES = 16 << 10  # read from the file for each embedding row: the OS reads neighbouring pages too
_FLOAT = 4


def head_to_seal(head: HeadSpec, model: ModelSpec, offer: Offer) -> HeadSpec:
    """Return the head as it is sealed for an offer: with the model's embedding if the target cannot look tokens up.

    Targets hand out scaled embeddings, and an EAGLE-3 head reads them without the scale.
    """
    looked_up = head.kind != "eagle3" or (offer.capabilities.kv_layers and model.embedding_scale == 1)
    return head if looked_up or head.own_embedding else head.model_copy(update={"own_embedding": True})


def head_file_bytes(head: HeadSpec) -> int:
    """Return the bytes of a sealed head: matrices in float32, used straight from the file, and embedding in 16 bits."""
    return _matrix_bytes(head) + _table_bytes(head) + head.layer.vocab_size + head.draft_vocab_size * 8


def head_terms(head: HeadSpec, tokens: int) -> tuple[Term, ...]:
    """Return the weights of a head that drafts over `tokens` tokens, and of its file."""
    rows = min(_table_bytes(head), tokens * _PAGE_BYTES)
    return (
        sized("mapped_weights_bytes", _matrix_bytes(head) + rows, "of the head"),
        sized("disk_bytes", head_file_bytes(head), "of the head"),
    )


def head_why(head: HeadSpec) -> str:
    """Say what the bytes of a drafting head are."""
    return (
        f"the head's {'' if head.kv_layers else 'caches and '}hidden states; its weights, with rows for "
        f"{head.draft_vocab_size:,} draft tokens, are mapped with the model's"
    )


def _table_bytes(head: HeadSpec) -> int:
    return head.layer.vocab_size * head.layer.hidden_size * 2 if head.own_embedding else 0


def _matrix_bytes(head: HeadSpec) -> int:
    item = 2 if head.head_type == "F16" else _FLOAT
    return sum((item if name == HEAD else _FLOAT) * prod(shape) for name, shape in head.tensors())
