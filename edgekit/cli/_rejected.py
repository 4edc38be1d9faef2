"""Tables of the options that a plan did not take, or that do not fit."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence

import click

from edgekit.cli._console import draw
from edgekit.contracts.plan import Plan, Rejected
from edgekit.errors import DoesNotFit, EdgekitError, Unsupported
from edgekit.planner.table import distance, rows_of

_WHY = "why not → the smallest change that helps"


def plans_that_fit(
    plan: Callable[[list[str]], list[Plan]], names: list[str]
) -> tuple[list[Plan], dict[str, EdgekitError]]:
    """Return the plans of the devices that can have the model, and for each other one the error of it alone."""
    try:
        return plan(names), {}
    except (DoesNotFit, Unsupported) as error:
        if len(names) == 1:
            return [], {names[0]: error}
        refused = {name: error for each in names for name, error in plans_that_fit(plan, [each])[1].items()}
        if not refused:
            raise  # each could have it, but not all together
    fitting = [name for name in names if name not in refused]
    return plan(fitting) if fitting else [], refused


def together(refused: Mapping[str, EdgekitError]) -> EdgekitError:
    """Return the only error, or one with the messages and the options of all."""
    if len(refused) == 1:
        return next(iter(refused.values()))
    options = [error.rejected for error in refused.values() if isinstance(error, DoesNotFit)]
    return DoesNotFit("; ".join(map(str, refused.values())), rejected=dict(ChainMap(*options)))


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
