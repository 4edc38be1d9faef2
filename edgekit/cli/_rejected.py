"""Tables of the options that a plan did not take, or that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import click

from edgekit.cli._console import draw
from edgekit.contracts.plan import Plan, Rejected
from edgekit.errors import DoesNotFit
from edgekit.planner.table import distance, rows_of

_WHY = "why not → the smallest change that helps"


def plans_that_fit(plan: Callable[[list[str]], list[Plan]], names: list[str]) -> tuple[list[Plan], DoesNotFit | None]:
    """Return the plans of the devices on which the model fits, and the error that lists the others."""
    try:
        return plan(names), None
    except DoesNotFit as error:
        fitting = [name for index, name in enumerate(names) if error.without and index not in error.without]
        return plans_that_fit(plan, fitting)[0] if fitting else [], error


def show_what_does_not_fit(error: DoesNotFit, *, every: bool = False) -> None:
    """Print the options behind an error: of each target and backend the nearest one, or all of them."""
    for device, rejected in error.rejected.items():
        shown = rejected if every else list(_nearest_ones(rejected))
        draw_rejected(shown, f"{device}: nothing fits")
        if len(shown) < len(rejected):
            click.echo(f"{len(rejected) - len(shown)} more do not fit either; edgekit plan --all lists them")
    if error.table and not error.rejected:
        click.echo(error.table)


def draw_rejected(rejected: Sequence[Rejected], title: str = "") -> None:
    rows = []
    for option in rejected:
        for target, backend, recipe, memory, _, speed, quality, why in rows_of(option):
            rows.append((f"{target} {backend}".strip(), recipe, memory, speed, quality, why))
    draw(("not taken", "recipe", "memory", "tok/s", "quality", _WHY), rows, title=title, wraps_at=_WHY)


def counted(rejected: Sequence[Rejected]) -> str:
    """Count the rejected options that fit, and those that do not."""
    failed = sum(1 for each in rejected if each.failures)
    parts = [f"{len(rejected) - failed} fit" if len(rejected) > failed else "", f"{failed} do not" if failed else ""]
    return f"{' and '.join(part for part in parts if part)}; --all lists them with the reason"


def _nearest_ones(rejected: Sequence[Rejected]) -> Iterator[Rejected]:
    """Yield the nearest option of every target and backend, in their given order."""
    for place in dict.fromkeys((each.target, each.backend) for each in rejected):
        yield min((each for each in rejected if (each.target, each.backend) == place), key=distance)
