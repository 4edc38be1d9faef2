"""The specification of a drafting head: its layers, widths and vocabularies. Pure data.

Every kind pairs the embedding of token i + 1 with the target's hidden state of token i, and proposes token i + 2:

- `eagle3`: `fc` joins hidden states after several layers of the target. Queries, keys and values also
  read the embedding; a drafted token reads the head's own output instead.
- `mtp`: `fc` joins the embedding and the hidden state after the target's last norm, and a plain layer follows. A
  drafted token reads the head's own normed output instead. Embedding, head and last norm are the target's.
- `assistant`: `pre_projection` joins the same two, and several narrower layers follow that compute only queries: they
  attend to keys and values of the target's layers. `post_projection` gives the hidden state that a drafted token reads.
  Rows of its head may be in clusters, of which only the likeliest are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from edgekit.common.base import Frozen
from edgekit.common.bounds import LayerCount, LayerIndex, Sha256, Size, Tokens
from edgekit.model.spec import ModelSpec

LAYER = "layers.0."  # the prefix of its layer's tensors
HEAD, TARGET_NORM = "lm_head.weight", "target_norm.weight"
MTP_NORMS = EMBEDDING_NORM, HIDDEN_NORM = "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"
CENTROIDS = "centroids.weight"
SEALED = "edgekit_head"  # the field with the kind, in the config of a sealed head without a published layout
_FLOAT = 4  # bytes of a number while drafting
_OF_KEYS = ("k_proj", "v_proj", "k_norm")


class HeadSpec(Frozen):
    """The sizes of a head, and the hidden states that it reads from its target."""

    most_tokens: ClassVar[int] = 1024  # newest, that it attends to; at most as many hidden states wait for it
    block_tokens: ClassVar[int] = 64  # that it processes at once
    read_tokens: ClassVar[int] = 1024  # of the target's cache, that an assistant reads at once

    kind: Literal["eagle3", "mtp", "assistant"] = Field("eagle3", exclude_if=lambda value: value == "eagle3")
    layer: ModelSpec  # its only layer, or the layers of an assistant
    draft_vocab_size: Size
    target_hidden_size: Size
    # The head reads the concatenated hidden states of the target after each of these numbers of layers.
    hidden_layers: Annotated[tuple[LayerCount, ...], Field(min_length=1, max_length=16)]
    window: Tokens | None = None  # sliding window of its attention; None: all tokens
    norm_before_residual: bool = False
    norm_before_fc: bool = False  # one norm over the hidden states of all layers
    fc_norm: bool = False  # one norm per layer's hidden states
    norm_output: bool = False  # the output is normed before the next draft step reads it
    own_embedding: bool = False  # False: the target looks embeddings up for it
    # Of each layer of an assistant, the target's layer whose keys and values it attends to.
    kv_layers: Annotated[tuple[LayerIndex, ...], Field(max_length=64, exclude_if=lambda value: not value)] = ()
    clusters: Size | None = Field(None, exclude_if=lambda value: value is None)  # of the head's rows, equally many each
    active_clusters: Size | None = Field(None, exclude_if=lambda value: value is None)
    sha256: Sha256  # of its config and its tensors' layout

    @property
    def width(self) -> int:
        """Width of the concatenated hidden states of a token."""
        return len(self.hidden_layers) * self.target_hidden_size

    @property
    def head_type(self) -> str:
        """The number type of the sealed head's rows. Of clusters only a few rows are read, then made float32."""
        return "F16" if self.clusters else "F32"

    def cached_tokens(self, capacity: int) -> int:
        """Return the capacity of the head's cache for a request of `capacity` tokens."""
        return min(capacity, self.most_tokens, self.window or capacity)

    def private_bytes(self, tokens: int, sequences: int, chunk_tokens: int) -> int:
        """Return the private bytes of drafting for `sequences` requests of `tokens` tokens."""
        if self.kv_layers:
            return _FLOAT * self._assistant_values(sequences, chunk_tokens)
        return _FLOAT * self._layer_values(tokens, sequences, chunk_tokens)

    def _layer_values(self, tokens: int, sequences: int, chunk_tokens: int) -> int:
        """Return the numbers that drafting with a head of one layer holds."""
        layer, held = self.layer.layers[0], self.cached_tokens(tokens)
        cache = 2 * layer.kv_heads * layer.head_dim * held
        waiting = min(tokens, self.most_tokens + chunk_tokens) * self.width
        # A chunk's hidden states exist twice: in the engine's buffers, and in a copy that has all layers side by side.
        leaving = 2 * chunk_tokens * self.width
        block = min(self.block_tokens, held)
        attention = 2 * self.layer.heads * block * held
        gates = 3 * self.layer.heads * layer.head_dim if self.layer.attention_gate else 0
        activations = block * (self.width + 8 * self.layer.hidden_size + 3 * self.layer.intermediate_size + gates)
        logits = 2 * self.layer.vocab_size + self.draft_vocab_size * 3
        return sequences * (cache + waiting) + leaving + attention + activations + logits

    def _assistant_values(self, sequences: int, chunk_tokens: int) -> int:
        """Return the numbers that drafting with an assistant holds. It has no cache."""
        leaving = 2 * chunk_tokens * self.width
        model = self.layer
        # Keys, values and one more copy while they are turned to float32; scores and their exponentials.
        read = max(self.read_tokens * (3 * each.kv_heads * each.head_dim + 2 * model.heads) for each in model.layers)
        activations = 2 * self.width + 8 * model.hidden_size + 3 * model.intermediate_size
        rows = (self.active_clusters or 0) * model.hidden_size * (self.draft_vocab_size // (self.clusters or 1))
        logits = 2 * model.vocab_size + self.draft_vocab_size * 3
        return sequences * chunk_tokens * self.width + leaving + read + activations + rows + logits

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of all weights except the embedding and the vocabulary maps."""
        hidden = self.layer.hidden_size
        yield from self._around()
        prefix = f"{self.layer.prefix}layers."
        for tensor in self.layer.tensors():
            if not tensor.name.startswith(prefix) or (self.kv_layers and tensor.module.endswith(_OF_KEYS)):
                continue
            name = tensor.name.removeprefix(self.layer.prefix)
            reads_both = self.kind == "eagle3" and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            yield name, (tensor.shape[0], 2 * hidden) if reads_both else tensor.shape
        yield "norm.weight", (hidden,)
        yield HEAD, (self.draft_vocab_size, hidden)

    def _around(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the weights before and after the layers."""
        hidden, target = self.layer.hidden_size, self.target_hidden_size
        if self.kind == "assistant":
            yield "pre_projection.weight", (hidden, 2 * target)
            yield "post_projection.weight", (target, hidden)
            yield TARGET_NORM, (target,)
            if self.clusters:
                yield CENTROIDS, (self.clusters, hidden)
            return
        if self.kind == "mtp":
            yield "fc.weight", (hidden, 2 * hidden)
            yield from ((name, (hidden,)) for name in (TARGET_NORM, *MTP_NORMS))
            return
        yield "fc.weight", (hidden, self.width)
        yield f"{LAYER}hidden_norm.weight", (hidden,)
        if self.norm_before_fc:
            yield "input_norm.weight", (self.width,)
        for index in range(len(self.hidden_layers) if self.fc_norm else 0):
            yield f"fc_norm.{index}.weight", (target,)


class HeadConfig(NamedTuple):
    """The fields of a head's config, and where its tensors are."""

    layer_config: dict[str, Any]  # the sizes of the head's layers, in transformers' fields
    sizes: dict[str, Any]  # the fields of `HeadSpec` that follow from it
    prefix: str = ""  # of its tensors' names; names without it belong to a model in the same files
    from_target: tuple[str, ...] = ()  # tensors that it shares with its target, and that its files do not hold
    renamed: Mapping[str, str] = {}  # beginnings of names in its files → in `HeadSpec.tensors`
    others: tuple[str, ...] = ("d2t", "t2d")  # further tensors that its files may hold
    all_rows: bool = False  # its head has a row for each of the target's tokens, in their order
