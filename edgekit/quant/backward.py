"""A forward and a backward pass of a decoder over some sequences, which stop at every linear.

Memory holds the weights of one layer, and every layer's inputs for these sequences. A layer computes a piece of them at
a time: its weights are read once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from edgekit.model.spec import ModelSpec
from edgekit.quant import reference_decoder as decoder
from edgekit.quant.shards import ReadRows, WeightPart, parts_of

if TYPE_CHECKING:
    import torch

    # A linear's module, and its inputs [tokens, in], weights [out, in] and the gradient at its outputs [tokens, out].
    Note = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], None]

PIECE_BYTES = 320 << 20  # most bytes of the inputs of all layers for one piece; decides its number of sequences
PIECES = 4  # most pieces of a batch


def sequences_at_once(model: ModelSpec, length: int) -> int:
    """Return how many sequences of `length` tokens make a piece."""
    return max(1, PIECE_BYTES // (length * model.hidden_size * 4 * (len(model.layers) + 1)))


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
        import torch

        self._model, self._read, self._tick = model, read, tick
        parts = parts_of(model)
        self._embedding, self._layers = parts[0], parts[1:-1]
        self._at_once = sequences_at_once(model, ids.shape[1])
        self._pieces = [_SequenceGroup(model, some, multiply) for some in torch.split(ids, self._at_once)]

    def forward(self, observe: decoder.Observe = decoder.ignore) -> torch.Tensor:
        """Return the hidden states [batch, length, hidden] after the last layer.

        `observe` is called with each linear's module and its input.
        """
        import torch

        with torch.no_grad():
            for piece in self._pieces:
                piece.embed(self._embedding, self._read)
            for part in self._layers:
                self._tick(f"layer {part.layer}, forward")
                tensors = self._tensors(part)
                for piece in self._pieces:
                    piece.forward(part, tensors, decoder.of_layer(self._model, _index(part), observe))
        return torch.cat([piece.inputs.pop() for piece in self._pieces])

    def backward(self, gradient: torch.Tensor, note: Note) -> torch.Tensor:
        """Pass back the gradient at what `forward` returned to the embeddings of tokens, and return it there.

        `note` is called at each linear, the last layer's first.

        It is called once for each piece. Experts are not noted.
        """
        import torch

        gradients = list(torch.split(gradient, self._at_once))
        for part in reversed(self._layers):
            self._tick(f"layer {part.layer}, backward")
            tensors = self._tensors(part)
            for index, piece in enumerate(self._pieces):
                gradients[index] = piece.backward(part, tensors, gradients[index], note)
        return torch.cat(gradients)

    def _tensors(self, part: WeightPart) -> Mapping[str, torch.Tensor]:
        return {tensor.name.removeprefix(part.prefix): self._read(tensor.name) for tensor in part.tensors}


class _SequenceGroup:
    """The sequences that a layer computes together, and the inputs [sequences, length, hidden] of the layers so far."""

    def __init__(self, model: ModelSpec, ids: torch.Tensor, multiply: decoder.Multiply) -> None:
        self._model, self._ids, self._multiply = model, ids, multiply
        self.inputs: list[torch.Tensor] = []
        # Gradients at the keys and values that later layers read, by the layer that made them.
        self._at_kept: dict[int, Sequence[torch.Tensor]] = {}

    def embed(self, part: WeightPart, read: ReadRows) -> None:
        hidden = decoder.embed(self._model, embedding_rows(part, read, self._ids))
        self._side_inputs = decoder.layer_inputs(self._model, self._ids, hidden, read)
        self.inputs.append(hidden)

    def forward(self, part: WeightPart, tensors: Mapping[str, torch.Tensor], observe: decoder.Observe) -> None:
        """Add the next layer's inputs."""
        hidden = decoder.layer_forward(
            self._model,
            _index(part),
            tensors,
            self.inputs[-1],
            decoder.Hooks(observe, multiply=self._multiply),
            self._side_inputs,
        )
        self.inputs.append(hidden)

    def backward(
        self, part: WeightPart, tensors: Mapping[str, torch.Tensor], gradient: torch.Tensor, note: Note
    ) -> torch.Tensor:
        """Return the gradient at the layer's input, given the gradient at its output."""
        import torch

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
            hidden = self.inputs.pop().clone().requires_grad_()
            read = [] if owner == index else [each.detach().requires_grad_() for each in kept[owner]]
            if read:
                kept[owner] = read[0], read[1]
            hooks = decoder.Hooks(observe, observe_output, multiply=self._multiply)
            outputs = [decoder.layer_forward(self._model, index, tensors, hidden, hooks, self._side_inputs)]
        reached = self._at_kept.pop(index, ())
        outputs += kept[index] if reached else ()
        at_input, *at_read = torch.autograd.grad(outputs, [hidden, *read], [gradient, *reached])
        if read:
            before = self._at_kept.get(owner, [torch.zeros_like(each) for each in read])
            self._at_kept[owner] = [one + other for one, other in zip(before, at_read, strict=True)]
        return at_input


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
