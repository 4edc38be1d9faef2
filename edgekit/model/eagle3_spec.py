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
    """The sizes of an EAGLE-3 head, and the hidden states that it reads from its target."""

    layer: ModelSpec  # its only layer; queries, keys and values read an embedding concatenated with a hidden state
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
