"""Sensitivity of the loss on calibration text to each linear: one backward pass of the float model, layer by layer.

The predicted loss of a linear is the second-order term ½·E[(g·δW x)²] of rounding it to nearest, where g is the
gradient at the linear's output. A bit budget goes to the linears that gain most for their extra bytes.

Some sequences of the text suffice to rank linears.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edgekit.common.files import write_file
from edgekit.common.parsing import read_json
from edgekit.common.progress import Progress
from edgekit.contracts.recipe import Format, Recipe, Rule, budget_bytes, has_float_embedding, weight_bytes
from edgekit.model.spec import ModelSpec
from edgekit.model.tensors import Tensor
from edgekit.quant import reference_decoder as decoder
from edgekit.quant.backward import PIECES, TwoPasses, capped, head_blocks, head_name, sequences_at_once
from edgekit.quant.compute import product_on
from edgekit.quant.rtn import blocks, dequantise, in_parallel, round_to_nearest
from edgekit.quant.shards import ReadRows, WeightPart, held_as_one, parts_of

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
        if formats[module].has_few_bits:
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


class Promotion(NamedTuple):
    """Four-bit linears to promote together: the predicted loss of rounding them, and the extra bytes of eight bits."""

    modules: tuple[str, ...]
    loss: float
    extra_bytes: int


def resolve_budget(recipe: Recipe, model: ModelSpec, losses: PredictedLosses) -> Recipe:
    """Return `recipe` with a rule for every linear that is promoted to s8, within the recipe's byte budget.

    If the rules alone exceed the budget, nothing is promoted. Where embedding and head stay in float, as
    servers need them, linears that servers hold as one tensor are promoted together.
    """
    budget = budget_bytes(recipe, model)
    assert budget is not None
    room = budget - weight_bytes(model, recipe)
    promoted: set[str] = set()
    for each in sorted(_promotions(recipe, model, losses), key=lambda each: -each.loss / each.extra_bytes):
        if each.extra_bytes <= room:
            promoted.update(each.modules)
            room -= each.extra_bytes
    rules = tuple(
        Rule(pattern=tensor.module, format=Format(kind="s8")) for tensor in model.tensors() if tensor.module in promoted
    )
    return recipe.model_copy(update={"rules": rules + recipe.rules})


def _promotions(recipe: Recipe, model: ModelSpec, losses: PredictedLosses) -> list[Promotion]:
    together = has_float_embedding(recipe, model)
    promotions: list[Promotion] = []
    for group in (group for part in parts_of(model)[1:-1] for group in _groups(part, together)):
        coarse = [tensor for tensor in group if recipe.format_of(tensor).has_few_bits]
        if coarse:
            loss = sum(losses[tensor.module] for tensor in coarse)
            eight = Format(kind="s8")
            extra = sum(eight.bytes(each.shape) - recipe.format_of(each).bytes(each.shape) for each in coarse)
            promotions.append(Promotion(tuple(tensor.module for tensor in coarse), loss, extra))
    return promotions


def _groups(part: WeightPart, together: bool) -> list[list[Tensor]]:
    if together:
        return [group for group in held_as_one(part.tensors) if group[0].role == "linear"]
    return [[tensor] for tensor in part.tensors if tensor.role == "linear"]
