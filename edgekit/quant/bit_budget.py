"""Mixed precision under a byte budget: linears that gain most for their extra bytes are stored in eight bits."""

from __future__ import annotations

from typing import NamedTuple

from edgekit.contracts.recipe import Format, Recipe, Rule, budget_bytes, has_float_embedding, weight_bytes
from edgekit.model.spec import ModelSpec
from edgekit.model.tensors import Tensor
from edgekit.quant.sensitivity import PredictedLosses
from edgekit.quant.shards import WeightPart, held_as_one, parts_of


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
        four_bit = [tensor for tensor in group if recipe.format_of(tensor).kind == "s4"]
        if four_bit:
            loss = sum(losses[tensor.module] for tensor in four_bit)
            extra = sum(_extra(tensor, recipe.format_of(tensor)) for tensor in four_bit)
            promotions.append(Promotion(tuple(tensor.module for tensor in four_bit), loss, extra))
    return promotions


def _groups(part: WeightPart, together: bool) -> list[list[Tensor]]:
    if together:
        return [group for group in held_as_one(part.tensors) if group[0].role == "linear"]
    return [[tensor] for tensor in part.tensors if tensor.role == "linear"]


def _extra(tensor: Tensor, stored: Format) -> int:
    return Format(kind="s8").bytes(tensor.shape) - stored.bytes(tensor.shape)
