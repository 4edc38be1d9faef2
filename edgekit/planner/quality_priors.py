"""Priors: the loss expected of a recipe until it is measured for a model. It is the worst that was measured like it.

`python -m examples.benchmarks.measured_page` writes the rows, from the results that are stored next to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.resources import files
from itertools import chain

from pydantic import TypeAdapter

from edgekit.common.base import Frozen
from edgekit.common.bounds import Amount, Count, Share, Text, Word
from edgekit.contracts.plan import Method, Quality
from edgekit.contracts.recipe import AS_IS, Recipe
from edgekit.model.spec import ModelSpec

FLOAT32 = "float32"  # the reference decoder: stored weights lose as much with every target, or more
_SAME_SIZE = math.log(4.0)  # the largest ratio of parameter counts at which figures carry over
_ROUNDED = ("rtn", "none")  # a calibrated method loses less than these, where it was not measured
_AS_IS = Quality(kl=0.0, same_top=1.0, basis="prior", source="against the source, whose own integers are kept")


class QualityRow(Frozen):
    """What one model lost, with one recipe, method and target's arithmetic, on held-out texts."""

    model: Text
    family: Text
    parameters: Count
    target: Word  # or FLOAT32
    recipe: Text
    method: Method
    kl: tuple[Amount, Amount]  # mean nats a token: of the text that lost least, and of the one that lost most
    same_top: Share  # of the text that kept fewest top tokens


@cache
def quality_rows() -> tuple[QualityRow, ...]:
    """Return all stored rows."""
    text = files("edgekit.planner").joinpath("quality_rows.json").read_bytes()
    return TypeAdapter(tuple[QualityRow, ...]).validate_json(text)


def prior(recipe: Recipe, model: ModelSpec, target: str, method: Method) -> Quality:
    """Return the worst measured loss of a recipe, with the range of KL.

    Rows of models near in size count, of the same family if there are any; without one near, the rows of all models. A
    recipe that was not measured itself counts as the worst of its formats.
    """
    if recipe.name == AS_IS:
        return _AS_IS
    if recipe.keeps is not None:
        names: Sequence[tuple[str, ...]] = (("keep",), ("s8",))  # s8: as coarse or coarser where inputs are rounded too
    elif recipe.plain_name in {row.recipe for row in quality_rows()}:
        names = ((recipe.name,), (recipe.plain_name,))
    else:
        formats = {rule.format for rule in recipe.rules}
        names = (tuple(sorted(str(each) if each.has_few_bits else each.kind for each in formats)),)
    known = method if recipe.has_few_bits and recipe.keeps is None else None
    return _worst(tuple(names), model.name, model.family, model.parameters, target, known)


@lru_cache(maxsize=1024)
def _worst(
    names: tuple[tuple[str, ...], ...], model: str, family: str, parameters: int, target: str, method: Method | None
) -> Quality:
    found: dict[str, list[QualityRow]] = {}
    for name in dict.fromkeys(row.model for row in quality_rows()):
        own = [row for row in quality_rows() if row.model == name]
        parts = ([_under(own, part, target, method) for part in each] for each in names)
        found[name] = next((list(chain(*each)) for each in parts if all(each)), [])
    measured = [rows for rows in found.values() if rows]
    near = [rows for rows in measured if abs(math.log(rows[0].parameters / parameters)) <= _SAME_SIZE]
    alike = [rows for rows in near if rows[0].family == family]
    rows = list(chain(*(alike or near or measured)))
    what = " or ".join(" and ".join(each) for each in names)
    if not rows:
        return Quality(kl=None, same_top=None, basis="prior", source=f"{what} was not measured on any model")
    models = " and ".join(dict.fromkeys(row.model for row in rows))
    if any((row.model, row.parameters) == (model, parameters) for row in rows):
        origin = f"measured on {models}"
    else:
        origin = f"as {models}, near in size{' and family' if alike else ''}" if near else "the worst of other sizes"
    seen = ", ".join(sorted({f"{row.recipe} {row.method} on {row.target}" for row in rows}))
    return Quality(
        kl=max(row.kl[1] for row in rows),
        kl_low=min(row.kl[0] for row in rows),
        same_top=min(row.same_top for row in rows),
        basis="prior",
        origin=origin,
        source=f"{models}: {seen}, held-out code, prose and chats",
    )


def _under(rows: Sequence[QualityRow], recipe: str, target: str, method: Method | None) -> list[QualityRow]:
    """Return a model's rows of one recipe and method on a target; of all targets, if this one has none."""
    same = [row for row in rows if row.recipe == recipe and (method is None or row.method in (method, *_ROUNDED))]
    own = [row for row in same if row.target == target]
    chosen = [row for row in own if row.method == method] or own
    methods = {row.method for row in chosen}
    return [*chosen, *(row for row in same if row.target == FLOAT32 and row.method in methods)] if chosen else same
