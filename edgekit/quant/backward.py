"""A forward and a backward pass of a decoder over some sequences, which stop at every linear.

Memory holds the weights of one layer, and every layer's inputs for these sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from edgekit.model.spec import ModelSpec
from edgekit.quant import reference_decoder as decoder
from edgekit.quant.shards import ReadRows, WeightPart, parts_of
from edgekit.quant.side_inputs import layer_inputs

if TYPE_CHECKING:
    import torch

    # A linear's module, and its inputs [tokens, in], weights [out, in] and the gradient at its outputs [tokens, out].
    Note = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], None]

HELD_BYTES = 256 << 20  # most bytes of layer inputs in memory; decides how many sequences run at a time


def sequences_at_once(model: ModelSpec, length: int) -> int:
    """Return how many sequences of `length` tokens fit `HELD_BYTES`."""
    return max(1, HELD_BYTES // (length * model.hidden_size * 4 * (len(model.layers) + 1)))


class TwoPasses:
    """One batch of sequences `ids` [batch, length], forward and then backward. `read` gives the weights."""

    def __init__(
        self,
        model: ModelSpec,
        read: ReadRows,
        ids: torch.Tensor,
        tick: Callable[[str], None],
        multiply: decoder.Multiply = decoder.product,
    ) -> None:
        self._model, self._read, self._ids, self._tick, self._multiply = model, read, ids, tick, multiply
        parts = parts_of(model)
        self._embedding, self._layers = parts[0], parts[1:-1]
        self._inputs: list[torch.Tensor] = []
        # Gradients at the keys and values that later layers read, by the layer that made them.
        self._at_kept: dict[int, Sequence[torch.Tensor]] = {}

    def forward(self, observe: decoder.Observe = decoder.ignore) -> torch.Tensor:
        """Return the hidden states [batch, length, hidden] after the last layer.

        `observe` is called with each linear's module and its input.
        """
        import torch

        with torch.no_grad():
            hidden = decoder.embed(self._model, embedding_rows(self._embedding, self._read, self._ids))
            self._side_inputs = layer_inputs(self._model, self._ids, hidden, self._read)
            for part in self._layers:
                self._tick(f"layer {part.layer}, forward")
                self._inputs.append(hidden)
                hidden = decoder.layer_forward(
                    self._model,
                    _index(part),
                    self._tensors(part),
                    hidden,
                    decoder.of_layer(self._model, _index(part), observe),
                    side_inputs=self._side_inputs,
                    multiply=self._multiply,
                )
        return hidden

    def backward(self, gradient: torch.Tensor, note: Note) -> None:
        """Pass back the gradient at what `forward` returned; `note` is called at each linear, the last layer's first.

        Experts are not noted.
        """
        for part in reversed(self._layers):
            self._tick(f"layer {part.layer}, backward")
            gradient = self._through(part, gradient, note)

    def _through(self, part: WeightPart, gradient: torch.Tensor, note: Note) -> torch.Tensor:
        """Return the gradient at the layer's input, given that at its output."""
        import torch

        tensors = self._tensors(part)
        linears = {tensor.module.removeprefix(part.prefix) for tensor in part.tensors if tensor.role == "linear"}
        seen: dict[str, torch.Tensor] = {}

        def observe(name: str, values: torch.Tensor) -> None:
            if name in linears:
                seen[name] = values.detach().flatten(0, 1)

        def noting(name: str, values: torch.Tensor) -> Callable[[torch.Tensor], None]:
            weights = tensors[f"{name}.weight"]
            return lambda at: note(part.prefix + name, values, weights, at.flatten(0, 1))

        def observe_output(name: str, outputs: torch.Tensor) -> None:
            if name in seen:
                outputs.register_hook(noting(name, seen.pop(name)))  # type: ignore[no-untyped-call]

        index = _index(part)
        owner, kept = self._model.kv_owner(index), self._side_inputs.kept
        with torch.enable_grad():
            hidden = self._inputs.pop().clone().requires_grad_()
            read = [] if owner == index else [each.detach().requires_grad_() for each in kept[owner]]
            if read:
                kept[owner] = read[0], read[1]
            outputs = [
                decoder.layer_forward(
                    self._model,
                    index,
                    tensors,
                    hidden,
                    observe,
                    observe_output=observe_output,
                    side_inputs=self._side_inputs,
                    multiply=self._multiply,
                )
            ]
        reached = self._at_kept.pop(index, ())
        outputs += kept[index] if reached else ()
        at_input, *at_read = torch.autograd.grad(outputs, [hidden, *read], [gradient, *reached])
        if read:
            before = self._at_kept.get(owner, [torch.zeros_like(each) for each in read])
            self._at_kept[owner] = [one + other for one, other in zip(before, at_read, strict=True)]
        return at_input

    def _tensors(self, part: WeightPart) -> Mapping[str, torch.Tensor]:
        return {tensor.name.removeprefix(part.prefix): self._read(tensor.name) for tensor in part.tensors}


def capped(model: ModelSpec, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return logits after the model's soft cap and the cap's derivative; None where it has no cap."""
    import torch

    if model.logit_softcap is None:
        return logits, None
    share = torch.tanh(logits / model.logit_softcap)
    return share * model.logit_softcap, 1 - share.square()


def embedding_rows(part: WeightPart, read: ReadRows, ids: torch.Tensor) -> torch.Tensor:
    """Look up tokens [batch, length] in the embedding table of the first part."""
    import torch

    table = next(tensor.name for tensor in part.tensors if tensor.role == "embedding")
    seen, where = torch.unique(ids, return_inverse=True)
    return torch.cat([read(table, slice(row, row + 1)) for row in seen.tolist()])[where]


def head_blocks(model: ModelSpec) -> list[slice]:
    """Split the rows of the head, so that a whole row of logits is never in memory."""
    starts = range(0, model.vocab_size, decoder.HEAD_ROWS)
    return [slice(start, min(start + decoder.HEAD_ROWS, model.vocab_size)) for start in starts]


def head_name(model: ModelSpec) -> str:
    """Return the name of the tensor of the head, which may be the embedding."""
    return f"{model.prefix}embed_tokens.weight" if model.tied else f"{model.head}.weight"


def _index(part: WeightPart) -> int:
    assert part.layer is not None
    return part.layer
