"""Sensitivity of the loss on calibration text to each linear: one backward pass of the float model, layer by layer.

The predicted loss of a linear is the second-order term ½·E[(g·δW x)²] of rounding it to nearest, where g is the
gradient at the linear's output. A bit budget goes to the linears with the largest.

Some sequences of the text suffice to rank linears. A few pass at a time: memory holds the weights of one layer, and
every layer's inputs for these sequences.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgekit.common.files import write_file
from edgekit.common.parsing import read_json
from edgekit.common.progress import Progress
from edgekit.contracts.recipe import Recipe
from edgekit.model.spec import ModelSpec
from edgekit.quant import reference_decoder as decoder
from edgekit.quant.rtn import dequantise, round_to_nearest
from edgekit.quant.shards import ReadRows, WeightPart, parts_of
from edgekit.quant.side_inputs import SideInputs, layer_inputs

if TYPE_CHECKING:
    import torch

    from edgekit.quant.calibration import Calibration

HELD_BYTES = 256 << 20  # most bytes of layer inputs in memory; decides how many sequences run at a time
SCORED_TOKENS = 4096  # enough to rank linears

PredictedLosses = Mapping[str, float]  # module → loss of four bits, in nats per token
AtKept = dict[int, Sequence["torch.Tensor"]]  # by layer: gradients at its keys and at its values


def predicted_losses(
    recipe: Recipe, model: ModelSpec, calibration: Calibration, read: ReadRows, progress: Progress
) -> PredictedLosses:
    """Return the predicted loss of each linear, from a forward and backward pass over some of the calibration text."""
    import torch

    ids = _spread(torch.tensor(calibration.sequences))
    parts = parts_of(model)
    layers, last = parts[1:-1], parts[-1]
    held = max(1, HELD_BYTES // (ids.shape[1] * model.hidden_size * 4 * (len(layers) + 1)))
    losses: dict[str, float] = {}
    batches = torch.split(ids, held)
    done, total = 0, 2 * len(batches) * len(layers)
    for batch in batches:
        with torch.no_grad():
            inputs = [decoder.embed(model, embedding_rows(parts[0], read, batch))]
            side_inputs = layer_inputs(model, batch, inputs[0], read)
            for part in layers:
                progress(done, total, f"sensitivity: layer {part.layer}, forward")
                done += 1
                after = decoder.layer_forward(
                    model, _index(part), _tensors(part, read), inputs[-1], side_inputs=side_inputs
                )
                inputs.append(after)
            gradient = _head_gradient(model, last, read, inputs.pop(), batch)
        at_kept: AtKept = {}
        for part in reversed(layers):
            progress(done, total, f"sensitivity: layer {part.layer}, backward")
            done += 1
            tensors = _tensors(part, read)
            gradient = _through_layer(
                model, recipe, part, tensors, inputs.pop(), gradient, losses, side_inputs, at_kept
            )
    progress(total, total, "sensitivity")
    return {name: 0.5 * loss / ids.numel() for name, loss in losses.items()}


def _spread(ids: torch.Tensor) -> torch.Tensor:
    """Return sequences spread evenly over the text, about `SCORED_TOKENS` tokens in total."""
    import torch

    count = min(len(ids), max(1, SCORED_TOKENS // ids.shape[1]))
    return ids[torch.linspace(0, len(ids) - 1, count).round().long()]


def _through_layer(
    model: ModelSpec,
    recipe: Recipe,
    part: WeightPart,
    tensors: Mapping[str, torch.Tensor],
    inputs: torch.Tensor,
    gradient: torch.Tensor,
    losses: dict[str, float],
    side_inputs: SideInputs,
    at_kept: AtKept,
) -> torch.Tensor:
    """Return the gradient at the layer's input, given that at its output; add each linear's terms to `losses`.

    `at_kept` collects the gradients at the keys and values that later layers read, and passes them to their owner.
    """
    import torch

    formats = {tensor.module: recipe.format_of(tensor) for tensor in part.tensors if tensor.role == "linear"}
    seen: dict[str, torch.Tensor] = {}

    def observe(name: str, values: torch.Tensor) -> None:
        if part.prefix + name in formats:  # experts are not promoted
            seen[name] = values.detach().flatten(0, 1)

    def observe_output(name: str, outputs: torch.Tensor) -> None:
        module, values = part.prefix + name, seen.pop(name, None)
        if values is None or formats[module].kind != "s4":
            return

        def note(at: torch.Tensor) -> None:
            weights = tensors[f"{name}.weight"]
            moved = values @ (dequantise(*round_to_nearest(weights, formats[module])) - weights).T
            losses[module] = losses.get(module, 0.0) + float((moved * at.flatten(0, 1)).sum(-1).square().sum())

        outputs.register_hook(note)  # type: ignore[no-untyped-call]

    index = _index(part)
    owner = model.kv_owner(index)
    with torch.enable_grad():
        hidden = inputs.clone().requires_grad_()
        read = [] if owner == index else [kept.detach().requires_grad_() for kept in side_inputs.kept[owner]]
        if read:
            side_inputs.kept[owner] = read[0], read[1]
        outputs = [
            decoder.layer_forward(model, index, tensors, hidden, observe, None, observe_output, side_inputs=side_inputs)
        ]
    reached = at_kept.pop(index, ())
    outputs += side_inputs.kept[index] if reached else ()
    at_input, *at_read = torch.autograd.grad(outputs, [hidden, *read], [gradient, *reached])
    if read:
        before = at_kept.get(owner, [torch.zeros_like(each) for each in read])
        at_kept[owner] = [one + other for one, other in zip(before, at_read, strict=True)]
    return at_input


def _head_gradient(
    model: ModelSpec, last: WeightPart, read: ReadRows, hidden: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the summed next-token loss at the last layer's output.

    The head is read in blocks of rows, with an online softmax, so that a whole row of logits is never in memory.
    """
    import torch

    matrix = f"{model.prefix}embed_tokens.weight" if model.tied else f"{model.head}.weight"
    norm = read(decoder.last_norm(model))
    with torch.enable_grad():
        before = hidden[:, :-1].clone().requires_grad_()
        normed = decoder.final_norm(model, norm, before)
    rows, targets = normed.detach().flatten(0, 1), ids[:, 1:].flatten()
    greatest = torch.full((len(rows), 1), -torch.inf)
    total, pulled = torch.zeros((len(rows), 1)), torch.zeros_like(rows)
    for start in range(0, model.vocab_size, decoder.HEAD_ROWS):
        block = read(matrix, slice(start, min(start + decoder.HEAD_ROWS, model.vocab_size)))
        logits, slope = _capped(model, rows @ block.T)
        higher = torch.maximum(greatest, logits.amax(-1, keepdim=True))
        shrunk, shares = (greatest - higher).exp(), (logits - higher).exp_()
        total.mul_(shrunk).add_(shares.sum(-1, keepdim=True))
        pulled.mul_(shrunk).addmm_(shares if slope is None else shares * slope, block)
        greatest = higher
    seen, where = torch.unique(targets, return_inverse=True)
    pulling = torch.cat([read(matrix, slice(row, row + 1)) for row in seen.tolist()])[where]
    _, slope = _capped(model, (rows * pulling).sum(-1, keepdim=True))
    at_norm = pulled / total - (pulling if slope is None else pulling * slope)
    (at_input,) = torch.autograd.grad(normed, before, at_norm.view_as(normed))
    return torch.cat([at_input, torch.zeros_like(hidden[:, :1])], dim=1)


def _capped(model: ModelSpec, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
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


def _index(part: WeightPart) -> int:
    assert part.layer is not None
    return part.layer


def _tensors(part: WeightPart, read: ReadRows) -> dict[str, torch.Tensor]:
    return {tensor.name.removeprefix(part.prefix): read(tensor.name) for tensor in part.tensors}


def save_losses(path: Path, losses: PredictedLosses) -> None:
    """Store a measurement beside unfinished shards, so that a resumed run does not repeat it."""
    write_file(path, json.dumps(losses).encode())


def load_losses(path: Path) -> PredictedLosses:
    """Read a measurement that `save_losses` wrote."""
    return {name: float(loss) for name, loss in read_json(path).items()}
