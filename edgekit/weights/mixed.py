"""Which linears climb to eight bits under a budget: those whose rounding moves their layer's output most for the bytes.

Measured on calibration text in the float model, one linear at a time, or one group of those that servers hold as one
tensor. Knows nothing of how integers are chosen later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from edgekit.interfaces import Progress
from edgekit.model import ModelSpec, Tensor
from edgekit.recipe import Format, Recipe, Rule, weight_bytes
from edgekit.weights import decoder
from edgekit.weights.handover import held_as_one, is_for_servers
from edgekit.weights.parts import Part, Read, parts_of
from edgekit.weights.rtn import dequantise, round_to_nearest

if TYPE_CHECKING:
    import torch

    from edgekit.weights.calibration import Calibration

SEQUENCES = 8  # enough to order linears by


class Climber(NamedTuple):
    """Linears at four bits: how far their rounding moves the layer's output, and the bytes that eight would add."""

    modules: tuple[str, ...]
    error: float
    extra_bytes: int


def resolve_budget(
    recipe: Recipe, model: ModelSpec, calibration: Calibration, read: Read, progress: Progress
) -> Recipe:
    """`recipe` with a rule of its own for every linear that climbs; its bytes stay within its budget.

    Where the rules alone take more than the budget, nothing climbs. Where embedding and head stay in float, as servers
    want them, what servers hold as one tensor climbs together.
    """
    assert recipe.bits_per_weight is not None
    room = budget_bytes(recipe, model) - weight_bytes(model, recipe)
    if room <= 0:
        return recipe
    climbing: set[str] = set()
    for climber in sorted(_climbers(recipe, model, calibration, read, progress), key=lambda each: -_worth(each)):
        if climber.extra_bytes <= room:
            climbing.update(climber.modules)
            room -= climber.extra_bytes
    rules = tuple(
        Rule(pattern=tensor.module, format=Format(kind="s8")) for tensor in model.tensors() if tensor.module in climbing
    )
    return recipe.model_copy(update={"rules": rules + recipe.rules})


def budget_bytes(recipe: Recipe, model: ModelSpec) -> int:
    """What the weights may take."""
    assert recipe.bits_per_weight is not None
    return int(model.parameters * recipe.bits_per_weight / 8)


def _worth(climber: Climber) -> float:
    return climber.error / climber.extra_bytes


def _climbers(
    recipe: Recipe, model: ModelSpec, calibration: Calibration, read: Read, progress: Progress
) -> list[Climber]:
    import torch

    ids = torch.tensor(calibration.sequences[:SEQUENCES])
    together = is_for_servers(recipe, model)
    found: list[Climber] = []
    parts = parts_of(model)
    with torch.inference_mode():
        hidden = decoder.embed(model, _rows(parts[0], read, ids))
        for part in parts[1:-1]:
            assert part.layer is not None
            progress(part.layer, len(model.layers), f"sensitivity: layer {part.layer}")
            tensors = {tensor.name.removeprefix(part.prefix): read(tensor.name) for tensor in part.tensors}
            after = decoder.layer_forward(model, part.layer, tensors, hidden)
            for group in _groups(part, together):
                climbing = [tensor for tensor in group if recipe.format_of(tensor).kind == "s4"]
                if not climbing:
                    continue
                changed = dict(tensors)
                for tensor in climbing:
                    name = tensor.name.removeprefix(part.prefix)
                    changed[name] = dequantise(*round_to_nearest(tensors[name], recipe.format_of(tensor)))
                moved = decoder.layer_forward(model, part.layer, changed, hidden) - after
                error = float(moved.square().sum() / after.square().sum())
                extra = sum(_extra(tensor, recipe.format_of(tensor)) for tensor in climbing)
                found.append(Climber(tuple(tensor.module for tensor in climbing), error, extra))
            hidden = after
    return found


def _groups(part: Part, together: bool) -> list[list[Tensor]]:
    if together:
        return held_as_one(part.tensors)
    return [[tensor] for tensor in part.tensors if tensor.role == "linear"]


def _extra(tensor: Tensor, stored: Format) -> int:
    return Format(kind="s8").bytes(tensor.shape) - stored.bytes(tensor.shape)


def _rows(part: Part, read: Read, ids: torch.Tensor) -> torch.Tensor:
    import torch

    table = next(tensor.name for tensor in part.tensors if tensor.role == "embedding")
    seen, where = torch.unique(ids, return_inverse=True)
    return torch.cat([read(table, slice(row, row + 1)) for row in seen.tolist()])[where]
