"""The specification of an EAGLE-3 head: its layer, widths and vocabularies. Pure data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from edgekit.common.base import Frozen
from edgekit.common.bounds import LayerCount, Sha256, Size, Tokens
from edgekit.model.spec import ModelSpec

LAYER = "layers.0."  # the prefix of its layer's tensors


class Eagle3Spec(Frozen):
    """The sizes of an EAGLE-3 head, and what it reads of its target."""

    layer: ModelSpec  # its one layer; queries, keys and values read an embedding and a hidden state side by side
    draft_vocab_size: Size
    target_hidden_size: Size
    # The head reads the target's hidden states after each of these numbers of layers, side by side.
    hidden_layers: Annotated[tuple[LayerCount, ...], Field(min_length=1, max_length=16)]
    window: Tokens | None = None  # tokens that its attention reaches back; None: all
    norm_before_residual: bool = False
    norm_before_fc: bool = False  # one norm over the hidden states of all layers
    fc_norm: bool = False  # a norm over those of each layer
    norm_output: bool = False  # the output is normed before the next token reads it
    own_embedding: bool = False  # False: the target's is sealed with it
    sha256: Sha256  # of its config and of the layout of its weights

    @property
    def width(self) -> int:
        """Values of hidden states that it reads for each token."""
        return len(self.hidden_layers) * self.target_hidden_size

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of all weights but the embedding and the maps of the vocabulary."""
        hidden = self.layer.hidden_size
        yield "fc.weight", (hidden, self.width)
        if self.norm_before_fc:
            yield "input_norm.weight", (self.width,)
        for index in range(len(self.hidden_layers) if self.fc_norm else 0):
            yield f"fc_norm.{index}.weight", (self.target_hidden_size,)
        yield f"{LAYER}hidden_norm.weight", (hidden,)
        prefix = f"{self.layer.prefix}{LAYER}"
        for tensor in self.layer.tensors():
            if tensor.name.startswith(prefix):
                name = tensor.name.removeprefix(self.layer.prefix)
                reads_both = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
                yield name, (tensor.shape[0], 2 * hidden) if reads_both else tensor.shape
        yield "norm.weight", (hidden,)
        yield "lm_head.weight", (self.draft_vocab_size, hidden)
