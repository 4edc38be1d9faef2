"""The specification of a drafting head: its layer, widths and vocabularies. Pure data.

Both kinds are one decoder layer that pairs the embedding of token i + 1 with the target's hidden state of token i, and
proposes token i + 2. They differ before the layer:

- `eagle3`: `fc` joins hidden states after several layers of the target. Queries, keys and values read the embedding
  beside them; a drafted token reads the head's own output in their place.
- `mtp`: `fc` joins the embedding and one hidden state, that after the target's last norm, and a plain layer follows. A
  drafted token reads the head's own normed output in its place. Embedding, head and last norm are the target's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from edgekit.common.base import Frozen
from edgekit.common.bounds import LayerCount, Sha256, Size, Tokens
from edgekit.model.spec import ModelSpec

LAYER = "layers.0."  # the prefix of its layer's tensors
HEAD, TARGET_NORM = "lm_head.weight", "target_norm.weight"
MTP_NORMS = EMBEDDING_NORM, HIDDEN_NORM = "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"


class HeadSpec(Frozen):
    """The sizes of a head, and the hidden states that it reads from its target."""

    kind: Literal["eagle3", "mtp"] = Field("eagle3", exclude_if=lambda value: value == "eagle3")
    layer: ModelSpec  # its only layer
    draft_vocab_size: Size
    target_hidden_size: Size
    # The head reads the concatenated hidden states of the target after each of these numbers of layers.
    hidden_layers: Annotated[tuple[LayerCount, ...], Field(min_length=1, max_length=16)]
    window: Tokens | None = None  # sliding window of its attention; None: all tokens
    norm_before_residual: bool = False
    norm_before_fc: bool = False  # one norm over the hidden states of all layers
    fc_norm: bool = False  # one norm per layer's hidden states
    norm_output: bool = False  # the output is normed before the next draft step reads it
    own_embedding: bool = False  # False: it uses the target's, which is sealed with it
    sha256: Sha256  # of its config and its tensors' layout

    @property
    def width(self) -> int:
        """Width of the concatenated hidden states of a token."""
        return len(self.hidden_layers) * self.target_hidden_size

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of all weights except the embedding and the vocabulary maps."""
        hidden, is_mtp = self.layer.hidden_size, self.kind == "mtp"
        yield "fc.weight", (hidden, 2 * hidden if is_mtp else self.width)
        if is_mtp:
            yield from ((name, (hidden,)) for name in (TARGET_NORM, *MTP_NORMS))
        else:
            yield f"{LAYER}hidden_norm.weight", (hidden,)
        if self.norm_before_fc:
            yield "input_norm.weight", (self.width,)
        for index in range(len(self.hidden_layers) if self.fc_norm else 0):
            yield f"fc_norm.{index}.weight", (self.target_hidden_size,)
        prefix = f"{self.layer.prefix}{LAYER}"
        for tensor in self.layer.tensors():
            if tensor.name.startswith(prefix):
                name = tensor.name.removeprefix(self.layer.prefix)
                reads_both = not is_mtp and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
                yield name, (tensor.shape[0], 2 * hidden) if reads_both else tensor.shape
        yield "norm.weight", (hidden,)
        yield HEAD, (self.draft_vocab_size, hidden)


class HeadConfig(NamedTuple):
    """The fields of a head's config, and where its tensors are."""

    layer_config: dict[str, Any]  # the sizes of its layer, in transformers' fields
    sizes: dict[str, Any]  # the fields of `HeadSpec` that follow from it
    prefix: str = ""  # of its tensors' names; others are those of a model in the same files
    from_target: tuple[str, ...] = ()  # tensors that it shares with its target, and that its files do not hold
