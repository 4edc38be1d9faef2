"""Predicts the memory of a drafting head: its mapped weights, and the caches and features of its requests."""

from __future__ import annotations

from math import prod

from edgekit.contracts.memory import Term, sized
from edgekit.contracts.target import Offer
from edgekit.model.head_spec import HEAD, HeadSpec
from edgekit.model.spec import ModelSpec

HEAD_TOKENS = 1024  # a head attends to this many newest tokens, and at most as many hidden states wait for it
BLOCK_TOKENS = 64  # tokens that the head processes at once
READ_TOKENS = 1024  # of the target's cache, that an assistant reads at once
_PAGE_BYTES = 16 << 10  # read from the file for each embedding row: the OS reads neighbouring pages too
_FLOAT = 4


def head_to_seal(head: HeadSpec, model: ModelSpec, offer: Offer) -> HeadSpec:
    """Return the head as it is sealed for an offer: with the model's embedding if the target cannot look tokens up.

    Targets hand out scaled embeddings, and an EAGLE-3 head reads them without the scale.
    """
    looked_up = head.kind != "eagle3" or (offer.capabilities.kv_layers and model.embedding_scale == 1)
    return head if looked_up or head.own_embedding else head.model_copy(update={"own_embedding": True})


def head_tokens(head: HeadSpec, capacity: int) -> int:
    """Return the capacity of the head's cache for a request of `capacity` tokens."""
    return min(capacity, HEAD_TOKENS, head.window or capacity)


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


def head_private_bytes(head: HeadSpec, tokens: int, sequences: int, chunk_tokens: int) -> int:
    """Return the private bytes of drafting for `sequences` requests of `tokens` tokens."""
    if head.kv_layers:
        return _FLOAT * _assistant_values(head, sequences, chunk_tokens)
    return _FLOAT * _layer_values(head, tokens, sequences, chunk_tokens)


def _layer_values(head: HeadSpec, tokens: int, sequences: int, chunk_tokens: int) -> int:
    """Return the numbers that drafting with a head of one layer holds."""
    layer, held = head.layer.layers[0], head_tokens(head, tokens)
    cache = 2 * layer.kv_heads * layer.head_dim * held
    waiting = min(tokens, HEAD_TOKENS + chunk_tokens) * head.width
    # A chunk's hidden states exist twice: in the engine's buffers, and in a copy that has all layers side by side.
    leaving = 2 * chunk_tokens * head.width
    block = min(BLOCK_TOKENS, held)
    attention = 2 * head.layer.heads * block * held
    gates = 3 * head.layer.heads * layer.head_dim if head.layer.attention_gate else 0
    activations = block * (head.width + 8 * head.layer.hidden_size + 3 * head.layer.intermediate_size + gates)
    logits = 2 * head.layer.vocab_size + head.draft_vocab_size * 3
    return sequences * (cache + waiting) + leaving + attention + activations + logits


def _assistant_values(head: HeadSpec, sequences: int, chunk_tokens: int) -> int:
    """Return the numbers that drafting with an assistant holds. It has no cache."""
    leaving = 2 * chunk_tokens * head.width
    model = head.layer
    # Keys, values and one more copy while they are turned to float32; scores and their exponentials.
    read = max(READ_TOKENS * (3 * each.kv_heads * each.head_dim + 2 * model.heads) for each in model.layers)
    activations = 2 * head.width + 8 * model.hidden_size + 3 * model.intermediate_size
    rows = (head.active_clusters or 0) * model.hidden_size * (head.draft_vocab_size // (head.clusters or 1))
    logits = 2 * model.vocab_size + head.draft_vocab_size * 3
    return sequences * chunk_tokens * head.width + leaving + read + activations + rows + logits


def head_server_bytes(head: HeadSpec, ranks: int, tokens: int, kv_bits: int) -> int:
    """Return the bytes of a head on one of `ranks` GPUs that share it: weights in 16 bits, and `tokens` cached."""
    layer = head.layer.layers[0]
    values = prod((head.layer.vocab_size, head.layer.hidden_size)) if head.own_embedding else 0
    weights = 2 * (values + sum(prod(shape) for _, shape in head.tensors()))
    heads = -(-layer.kv_heads // ranks)
    return -(-weights // ranks) + 2 * heads * layer.head_dim * tokens * kv_bits // 8


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
