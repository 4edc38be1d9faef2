"""Bytes of weights as a target stores them. Also says which tensors are read by rows, and which caches are shared."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from edgekit.common.units import show_bytes
from edgekit.contracts.plan import MemoryFacts
from edgekit.contracts.recipe import INTEGER_BITS, Format, Recipe, budget_bytes, tensors_alike
from edgekit.model.spec import ModelSpec
from edgekit.model.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator


_IN_RECIPE = MemoryFacts(
    runtime_bytes=0, source="weights as a recipe has them, with scales of 16 bits", minimum_bits=16
)


def stored_weight_bytes(model: ModelSpec, recipe: Recipe, facts: MemoryFacts) -> int:
    """Return the bytes of the weights as a target stores them."""
    stored = _stored(model, recipe, facts)
    if by_rows := by_rows_bytes(model, recipe, facts):
        table = layer_table(model)
        stored += by_rows - tensor_bytes(table.shape, recipe.format_of(table), facts)
    budget = budget_bytes(recipe, model)
    if budget is None:
        return stored
    # A budget is spent in full unless the recipe's rules alone cost more. A target's own scales and biases come on top.
    return max(stored, budget + stored - _stored(model, recipe, _IN_RECIPE))


@lru_cache(maxsize=256)
def _stored(model: ModelSpec, recipe: Recipe, facts: MemoryFacts) -> int:
    return sum(
        each.number * tensor_bytes(each.tensor.shape, each.format, facts) for each in tensors_alike(model, recipe)
    )


def tensor_bytes(shape: tuple[int, ...], form: Format, facts: MemoryFacts) -> int:
    """Return the bytes of a tensor with its scales and biases."""
    rows, inputs, scale_bits = prod(shape[:-1]), shape[-1], facts.scale_bits + facts.bias_bits
    scale_bits += facts.minimum_bits * form.minima
    if form.is_float:
        return rows * inputs * facts.float_bits // 8 if facts.float_bits else form.bytes(shape)
    if form.has_few_bits:
        assert form.group is not None
        bits = INTEGER_BITS[form.kind]
        return rows * (
            inputs * bits // 8 + inputs // min(form.group, facts.scale_group or form.group) * scale_bits // 8
        )
    if form.kind == "s8":
        group = facts.scale_group or form.group or facts.row_group
        scales = -(-inputs // group) if group else 1
        return rows * (inputs + scales * scale_bits // 8)
    return form.bytes(shape)


def by_rows_bytes(model: ModelSpec, recipe: Recipe, facts: MemoryFacts) -> int:
    """Return the bytes of the per-layer embeddings, if they stay in the file and tokens look rows up."""
    if model.per_layer_input is None or facts.own_row_bytes is None:
        return 0
    table = layer_table(model)
    form = recipe.format_of(table)
    return tensor_bytes(table.shape, form, facts if form.is_float else _IN_RECIPE)


def layer_table(model: ModelSpec) -> Tensor:
    """Return the table of per-layer embeddings."""
    return next(tensor for tensor in model.tensors() if tensor.module == f"{model.prefix}embed_tokens_per_layer")


def rows_read_bytes(model: ModelSpec, recipe: Recipe, facts: MemoryFacts, tokens: int) -> int:
    """Return the mapped bytes of the rows of per-layer embeddings that `tokens` look up."""
    stored = by_rows_bytes(model, recipe, facts)
    if not stored:
        return 0
    row = stored // layer_table(model).shape[0]
    return min(stored, tokens * (row + (facts.own_row_bytes or 0)))


def sharing_notes(model: ModelSpec, recipe: Recipe, facts: MemoryFacts) -> Iterator[str]:
    """Yield notes: which tensors are read by rows, and which caches are shared (Gemma 4)."""
    by_rows = by_rows_bytes(model, recipe, facts)
    if by_rows:
        row = show_bytes(by_rows // layer_table(model).shape[0])
        yield f"per-layer embeddings, {show_bytes(by_rows)}, are read by rows from the mapped file: {row} a token"
    owners = [model.kv_owner(index) for index in range(len(model.layers))]
    shared = sorted({owner for index, owner in enumerate(owners) if owner != index})
    if shared:
        count = sum(owner != index for index, owner in enumerate(owners))
        of = " and ".join(map(str, shared))
        yield f"{count} of {len(owners)} layers read the caches of layers {of}, which are counted once"


def group_notes(model: ModelSpec, recipe: Recipe) -> Iterator[str]:
    """Yield a note for tensors that get a smaller group, because the recipe's does not divide their rows."""
    smaller: dict[str, int] = {}
    for tensor in model.tensors():
        stored = str(recipe.format_of(tensor))
        named = {str(rule.format) for rule in recipe.rules} | {str(recipe.float_format)}
        if stored not in named:
            smaller[stored] = smaller.get(stored, 0) + 1
    for form, count in sorted(smaller.items()):
        yield f"{count} tensors are stored as {form}, because the recipe's group does not divide their rows"


def adapter_bytes(model: ModelSpec, rank: int, bits: int, each: int = 0) -> int:
    """Return the bytes of an adapter on every linear: rank × (inputs + outputs) values, plus `each` bytes."""
    shapes = (tensor.shape for tensor in model.tensors() if tensor.role == "linear" and len(tensor.shape) == 2)
    return sum(each + rank * sum(shape) * bits // 8 for shape in shapes) if rank else 0
