"""Sensitivity of the loss on calibration text to each matrix: one backward pass of the float model, layer by layer.

The predicted loss of a linear is the second-order term ½·E[(g·δW x)²] of rounding it to nearest, where g is the
gradient at the linear's output. That of the head is half the variance of its logits' changes, and a table that it
shares adds ½·E[(g·δe)²] for the embeddings of tokens. A bit budget goes to what gains most for its extra bytes.

Some sequences of the text suffice to rank matrices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edgekit.common.files import write_file
from edgekit.common.parsing import read_json
from edgekit.common.progress import Progress
from edgekit.contracts.recipe import Format, Recipe, Rule, budget_bytes, has_float_embedding, weight_bytes
from edgekit.model.spec import ModelSpec
from edgekit.model.tensors import Tensor
from edgekit.quant import reference_decoder as decoder
from edgekit.quant.backward import (
    PIECES,
    TwoPasses,
    capped,
    embedding_rows,
    head_blocks,
    head_name,
    sequences_at_once,
)
from edgekit.quant.compute import product_on
from edgekit.quant.gptq import shares_left
from edgekit.quant.hessians import second_moments
from edgekit.quant.rtn import blocks, dequantise, in_parallel, round_to_nearest
from edgekit.quant.shards import ReadRows, WeightPart, held_as_one, parts_of

if TYPE_CHECKING:
    import torch

    from edgekit.quant.calibration import Calibration

SCORED_TOKENS = 4096  # enough to rank linears

_SAMPLED_ROWS = 2048  # of the head, to see how far off rounding is in each column

PredictedLosses = Mapping[str, float]  # module → loss of four bits, in nats per token


def predicted_losses(
    recipe: Recipe,
    model: ModelSpec,
    calibration: Calibration,
    read: ReadRows,
    progress: Progress,
    device: torch.device | None = None,
    *,
    by_gptq: bool = False,
) -> PredictedLosses:
    """Return the predicted loss of each linear and of the head, from two passes over some of the calibration text.

    `read` gives tensors on `device`; None: the processor. `by_gptq`: what GPTQ is predicted to leave of the losses.
    """
    import torch

    ids = spread(torch.tensor(calibration.sequences).to(device))
    at_once = sequences_at_once(model, ids.shape[1])
    batches = torch.split(ids, PIECES * at_once)
    done, total = 0, 2 * len(batches) * len(model.layers)

    def tick(what: str) -> None:
        nonlocal done
        at_linears.finish_layer()
        progress(done, total, f"sensitivity: {what}")
        done += 1

    multiply = product_on(ids.device)
    at_linears = _LinearLosses(recipe, model, multiply, by_gptq)
    head = next(tensor for tensor in model.tensors() if tensor.name == head_name(model))
    at_head = _HeadLoss(model, read, recipe.format_of(head), by_gptq)
    for batch in batches:
        passes = TwoPasses(model, read, batch, tick, multiply)
        hidden = passes.forward()
        pieces = zip(torch.split(hidden, at_once), torch.split(batch, at_once), strict=True)
        gradient = torch.cat([_head_gradient(model, read, *piece, at_head) for piece in pieces])
        at_head.add(batch, hidden, passes.backward(gradient, at_linears.add))
        at_linears.finish_layer()
    if at_head.stored.has_few_bits:
        at_linears.losses[head.module] = at_head.loss(ids.numel())
    progress(total, total, "sensitivity")
    return {name: 0.5 * loss / ids.numel() for name, loss in at_linears.losses.items()}


class _LinearLosses:
    """Twice the summed losses of the linears that a backward pass reaches, layer by layer."""

    def __init__(self, recipe: Recipe, model: ModelSpec, multiply: decoder.Multiply, by_gptq: bool) -> None:
        linears = [tensor for tensor in model.tensors() if tensor.is_linear]
        self._formats = {tensor.module: recipe.format_of(tensor) for tensor in linears}
        # Linears that read the same inputs have the moments of the first of them.
        self._first = {each.module: group[0].module for group in held_as_one(linears) for each in group}
        self._multiply, self._by_gptq = multiply, by_gptq
        self._nearest: dict[tuple[str, Format], dict[str, float]] = {}  # losses by rounding, by inputs and format
        self._changes: dict[str, torch.Tensor] = {}  # of their weights by rounding
        self._moments: dict[str, list[torch.Tensor]] = {}  # of their inputs in two halves of the text
        self.losses: dict[str, float] = {}

    def add(self, module: str, inputs: torch.Tensor, weights: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add a linear's loss on a piece of the text."""
        if self._by_gptq and self._first[module] == module:
            _add_halves(self._moments.setdefault(module, []), inputs, module)
        stored = self._formats[module]
        if not stored.has_few_bits:
            return
        if module not in self._changes:
            self._changes[module] = _change(weights, stored)
        moved = self._multiply(inputs, self._changes[module])
        alike = self._nearest.setdefault((self._first[module], stored), {})
        alike[module] = alike.get(module, 0.0) + float((moved * gradient).sum(-1).square().sum())

    def finish_layer(self) -> None:
        """Add what was found of a layer to the losses."""
        for (first, stored), nearest in self._nearest.items():
            moments, squared = self._moments.get(first), [self._changes[each].square().mean(0) for each in nearest]
            shares = shares_left(moments[0], moments[1], squared, stored) if moments else [1.0] * len(nearest)
            for (module, loss), share in zip(nearest.items(), shares, strict=True):
                self.losses[module] = self.losses.get(module, 0.0) + loss * share
        for kept in (self._nearest, self._changes, self._moments):
            kept.clear()


class _HeadLoss:
    """Twice the summed loss of rounding the head, and the table that it shares, to `stored`."""

    def __init__(self, model: ModelSpec, read: ReadRows, stored: Format, by_gptq: bool) -> None:
        self._model, self._read, self.stored, self._by_gptq = model, read, stored, by_gptq
        self.variance: float | None = None  # of a token's logits; one piece of the text shows it
        self._lookups = 0.0
        self._moments: list[torch.Tensor] = []  # of its inputs in two halves of the text

    def add(self, ids: torch.Tensor, hidden: torch.Tensor, at_embedding: torch.Tensor) -> None:
        """Add a batch's part: its hidden states after the last layer, and the gradient at its embeddings."""
        model, read = self._model, self._read
        if self.stored.has_few_bits and model.tied:
            rows = embedding_rows(parts_of(model)[0], read, ids).flatten(0, 1)
            moved = decoder.embed(model, _change(rows, self.stored)) * at_embedding.flatten(0, 1)
            self._lookups += float(moved.sum(-1).square().sum())
        if self.stored.has_few_bits and self._by_gptq:
            inputs = decoder.final_norm(model, read(decoder.last_norm(model)), hidden)
            _add_halves(self._moments, inputs.flatten(0, 1), "the head")

    def loss(self, tokens: int) -> float:
        """Return the loss of so many tokens. GPTQ leaves as much error in looked-up rows as rounding does."""
        import torch

        variance = (self.variance or 0.0) * tokens
        if self._moments:
            name, step = head_name(self._model), max(1, self._model.vocab_size // _SAMPLED_ROWS)
            rows = [self._read(name, slice(row, row + 1)) for row in range(0, self._model.vocab_size, step)]
            squared = _change(torch.cat(rows), self.stored).square().mean(0)
            variance *= shares_left(self._moments[0], self._moments[1], [squared], self.stored)[0]
        return variance + self._lookups


def _add_halves(moments: list[torch.Tensor], inputs: torch.Tensor, module: str) -> None:
    """Add the second moments of the first and of the second half of `inputs` [tokens, in]."""
    half = len(inputs) // 2
    found = [second_moments(some, module) for some in (inputs[:half], inputs[half:])]
    moments[:] = [one + other for one, other in zip(moments, found, strict=True)] if moments else found


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


def float_passes(
    model: ModelSpec,
    calibration: Calibration,
    read: ReadRows,
    progress: Progress,
    title: str,
    device: torch.device | None = None,
    observe: decoder.Observe = decoder.ignore,
) -> Iterator[torch.Tensor]:
    """Run the float model over some of the calibration text; yield the hidden states after its last layer.

    `observe` is called with each linear's module and its inputs, `progress` with each layer, after `title`.
    """
    import torch

    ids = spread(torch.tensor(calibration.sequences).to(device))
    batches = torch.split(ids, PIECES * sequences_at_once(model, ids.shape[1]))
    done = 0

    def tick(what: str) -> None:
        nonlocal done
        progress(done, len(batches) * len(model.layers), f"{title}: {what}")
        done += 1

    for batch in batches:
        yield TwoPasses(model, read, batch, tick, product_on(ids.device)).forward(observe)


def _head_gradient(
    model: ModelSpec, read: ReadRows, hidden: torch.Tensor, ids: torch.Tensor, head: _HeadLoss
) -> torch.Tensor:
    """Return the gradient of the summed next-token loss at the last layer's output, by an online softmax.

    The first piece also gives `head` the variance of the changes of its logits by rounding.
    """
    import torch

    matrix, norm = head_name(model), read(decoder.last_norm(model))
    with torch.enable_grad():
        before = hidden[:, :-1].clone().requires_grad_()
        normed = decoder.final_norm(model, norm, before)
    rows, targets = normed.detach().flatten(0, 1), ids[:, 1:].flatten()
    greatest = torch.full_like(rows[:, :1], -torch.inf)
    total, pulled = torch.zeros_like(greatest), torch.zeros_like(rows)
    mean, square = torch.zeros_like(greatest), torch.zeros_like(greatest)
    is_first = head.stored.has_few_bits and head.variance is None
    for rows_of_head in head_blocks(model):
        block = read(matrix, rows_of_head)
        logits, slope = capped(model, rows @ block.T)
        higher = torch.maximum(greatest, logits.amax(-1, keepdim=True))
        shrunk, shares = (greatest - higher).exp(), (logits - higher).exp_()
        total.mul_(shrunk).add_(shares.sum(-1, keepdim=True))
        if is_first:
            moved = rows @ _change(block, head.stored).T
            moved = moved if slope is None else moved * slope
            mean.mul_(shrunk).add_((shares * moved).sum(-1, keepdim=True))
            square.mul_(shrunk).add_((shares * moved.square_()).sum(-1, keepdim=True))
        pulled.mul_(shrunk).addmm_(shares if slope is None else shares * slope, block)
        greatest = higher
    seen, where = torch.unique(targets, return_inverse=True)
    pulling = torch.cat([read(matrix, slice(row, row + 1)) for row in seen.tolist()])[where]
    _, slope = capped(model, (rows * pulling).sum(-1, keepdim=True))
    at_norm = pulled / total - (pulling if slope is None else pulling * slope)
    (at_input,) = torch.autograd.grad(normed, before, at_norm.view_as(normed))
    head.variance = float((square / total - (mean / total).square()).mean()) if is_first else head.variance
    return torch.cat([at_input, torch.zeros_like(hidden[:, :1])], dim=1)


def save_losses(path: Path, losses: PredictedLosses) -> None:
    """Store a measurement in the folder of unfinished shards, so that a resumed run does not repeat it."""
    write_file(path, json.dumps(losses).encode())


def load_losses(path: Path) -> PredictedLosses:
    """Read a measurement that `save_losses` wrote."""
    return {name: float(loss) for name, loss in read_json(path).items()}


def _within(room: int, order: Sequence[Promotion]) -> dict[str, float]:
    """Return the modules of the promotions that fit, and what each saves of the loss."""
    promoted: dict[str, float] = {}
    for each in order:
        if each.extra_bytes <= room:
            promoted |= dict.fromkeys(each.modules, each.loss / len(each.modules))
            room -= each.extra_bytes
    return promoted


class Promotion(NamedTuple):
    """Four-bit matrices to promote together: the predicted loss of rounding them, and the extra bytes of eight bits."""

    modules: tuple[str, ...]
    loss: float
    extra_bytes: int


def resolve_budget(recipe: Recipe, model: ModelSpec, losses: PredictedLosses) -> Recipe:
    """Return `recipe` with a rule for every matrix that is promoted to s8, within the recipe's byte budget.

    If the rules alone exceed the budget, nothing is promoted. Where embedding and head stay in float, as
    servers need them, linears that servers hold as one tensor are promoted together.
    """
    budget = budget_bytes(recipe, model)
    assert budget is not None
    room = budget - weight_bytes(model, recipe)
    order = sorted(_promotions(recipe, model, losses), key=lambda each: -each.loss / each.extra_bytes)
    # A head may be larger than all linears before it, so it comes first or not at all.
    head = [each for each in order if each.modules == (head_name(model).removesuffix(".weight"),)]
    linears = [each for each in order if each not in head]
    with_head, without = _within(room, [*head, *linears]), _within(room, linears)
    promoted = max(without, with_head, key=lambda each: sum(each.values()))
    rules = tuple(
        Rule(pattern=tensor.module, format=Format(kind="s8")) for tensor in model.tensors() if tensor.module in promoted
    )
    return recipe.model_copy(update={"rules": rules + recipe.rules})


def _promotions(recipe: Recipe, model: ModelSpec, losses: PredictedLosses) -> list[Promotion]:
    together = has_float_embedding(recipe, model)
    promotions: list[Promotion] = []
    head = [tensor for tensor in model.tensors() if tensor.name == head_name(model)]
    for group in [head, *(group for part in parts_of(model)[1:-1] for group in _groups(part, together))]:
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
