"""Sensitivity of the loss on calibration text to each linear: one backward pass of the float model, layer by layer.

The predicted loss of a linear is the second-order term ½·E[(g·δW x)²] of rounding it to nearest, where g is the
gradient at the linear's output. A bit budget goes to the linears with the largest.

Some sequences of the text suffice to rank linears.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from edgekit.common.files import write_file
from edgekit.common.parsing import read_json
from edgekit.common.progress import Progress
from edgekit.contracts.recipe import Format, Recipe
from edgekit.model.spec import ModelSpec
from edgekit.quant import reference_decoder as decoder
from edgekit.quant.backward import PIECES, TwoPasses, capped, head_blocks, head_name, sequences_at_once
from edgekit.quant.compute import product_on
from edgekit.quant.rtn import blocks, dequantise, in_parallel, round_to_nearest
from edgekit.quant.shards import ReadRows

if TYPE_CHECKING:
    import torch

    from edgekit.quant.calibration import Calibration

SCORED_TOKENS = 4096  # enough to rank linears

PredictedLosses = Mapping[str, float]  # module → loss of four bits, in nats per token


def predicted_losses(
    recipe: Recipe,
    model: ModelSpec,
    calibration: Calibration,
    read: ReadRows,
    progress: Progress,
    device: torch.device | None = None,
) -> PredictedLosses:
    """Return the predicted loss of each linear, from a forward and backward pass over some of the calibration text.

    `read` gives tensors on `device`; None: the processor.
    """
    import torch

    ids = spread(torch.tensor(calibration.sequences).to(device))
    at_once = sequences_at_once(model, ids.shape[1])
    batches = torch.split(ids, PIECES * at_once)
    done, total = 0, 2 * len(batches) * len(model.layers)

    def tick(what: str) -> None:
        nonlocal done
        changes.clear()  # another layer begins
        progress(done, total, f"sensitivity: {what}")
        done += 1

    multiply = product_on(ids.device)
    formats = {tensor.module: recipe.format_of(tensor) for tensor in model.tensors() if tensor.is_linear}
    losses: dict[str, float] = {}
    changes: dict[str, torch.Tensor] = {}  # of the weights of this layer's linears by rounding

    def add(module: str, inputs: torch.Tensor, weights: torch.Tensor, gradient: torch.Tensor) -> None:
        if formats[module].kind == "s4":
            if module not in changes:
                changes[module] = _change(weights, formats[module])
            moved = multiply(inputs, changes[module])
            losses[module] = losses.get(module, 0.0) + float((moved * gradient).sum(-1).square().sum())

    for batch in batches:
        passes = TwoPasses(model, read, batch, tick, multiply)
        pieces = zip(torch.split(passes.forward(), at_once), torch.split(batch, at_once), strict=True)
        passes.backward(torch.cat([_head_gradient(model, read, *piece) for piece in pieces]), add)
    progress(total, total, "sensitivity")
    return {name: 0.5 * loss / ids.numel() for name, loss in losses.items()}


def _change(weights: torch.Tensor, stored: Format) -> torch.Tensor:
    """Return the error of the weights [out, in] that rounding to nearest makes."""
    import torch

    def of_rows(rows: slice) -> torch.Tensor:
        return dequantise(*round_to_nearest(weights[rows], stored)).sub_(weights[rows])

    return torch.cat(in_parallel(of_rows, blocks(*weights.shape)))


def spread(ids: torch.Tensor) -> torch.Tensor:
    """Return sequences spread evenly over the text, about `SCORED_TOKENS` tokens in total."""
    import torch

    count = min(len(ids), max(1, SCORED_TOKENS // ids.shape[1]))
    return ids[torch.linspace(0, len(ids) - 1, count).round().long().to(ids.device)]


def _head_gradient(model: ModelSpec, read: ReadRows, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the summed next-token loss at the last layer's output, by an online softmax."""
    import torch

    matrix, norm = head_name(model), read(decoder.last_norm(model))
    with torch.enable_grad():
        before = hidden[:, :-1].clone().requires_grad_()
        normed = decoder.final_norm(model, norm, before)
    rows, targets = normed.detach().flatten(0, 1), ids[:, 1:].flatten()
    greatest = torch.full_like(rows[:, :1], -torch.inf)
    total, pulled = torch.zeros_like(greatest), torch.zeros_like(rows)
    for rows_of_head in head_blocks(model):
        block = read(matrix, rows_of_head)
        logits, slope = capped(model, rows @ block.T)
        higher = torch.maximum(greatest, logits.amax(-1, keepdim=True))
        shrunk, shares = (greatest - higher).exp(), (logits - higher).exp_()
        total.mul_(shrunk).add_(shares.sum(-1, keepdim=True))
        pulled.mul_(shrunk).addmm_(shares if slope is None else shares * slope, block)
        greatest = higher
    seen, where = torch.unique(targets, return_inverse=True)
    pulling = torch.cat([read(matrix, slice(row, row + 1)) for row in seen.tolist()])[where]
    _, slope = capped(model, (rows * pulling).sum(-1, keepdim=True))
    at_norm = pulled / total - (pulling if slope is None else pulling * slope)
    (at_input,) = torch.autograd.grad(normed, before, at_norm.view_as(normed))
    return torch.cat([at_input, torch.zeros_like(hidden[:, :1])], dim=1)


def save_losses(path: Path, losses: PredictedLosses) -> None:
    """Store a measurement in the folder of unfinished shards, so that a resumed run does not repeat it."""
    write_file(path, json.dumps(losses).encode())


def load_losses(path: Path) -> PredictedLosses:
    """Read a measurement that `save_losses` wrote."""
    return {name: float(loss) for name, loss in read_json(path).items()}
