"""`edgekit eval --tasks` with names of public tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekit.apps.bench.commands.reports import ReportFiles, show
from edgekit.commands import progress_display
from edgekit.contracts.installed import holds_artifact
from edgekit.errors import InvalidInput, quote_short

if TYPE_CHECKING:
    from edgekit.apps.bench.tasks.run import TaskOptions

NAMES = ("humaneval", "gsm8k", "hellaswag", "truthfulqa", "calls")


def names_in(tasks: tuple[str, ...]) -> list[str]:
    """Return the public tasks that `--tasks` names; empty if it names a file."""
    listed = [name for each in tasks for name in each.split(",")]
    if all(name in NAMES for name in listed):
        return listed
    if len(tasks) > 1 or any(name in NAMES for name in listed):
        wrong = next(name for name in listed if name not in NAMES)
        raise InvalidInput(f"--tasks {quote_short(wrong)}: known tasks are {', '.join(NAMES)}; give a file alone")
    if tasks and not Path(tasks[0]).exists():
        raise InvalidInput(f"--tasks {quote_short(tasks[0])}: neither a file nor a task; known: {', '.join(NAMES)}")
    return []


def evaluate_public(
    artifact: Path,
    reference: str | None,
    names: list[str],
    options: TaskOptions,
    as_json: bool,
    files: ReportFiles,
) -> None:
    """Run the tasks and show shares, intervals and, if there is a reference, paired differences."""
    from edgekit.apps.bench.report.results import Report
    from edgekit.apps.bench.report.task_tables import comparisons_table, public_tasks_table
    from edgekit.apps.bench.tasks.run import run_tasks

    paths = [artifact]
    if reference is not None:
        if not holds_artifact(Path(reference)):
            raise InvalidInput(f"--reference {reference}: tasks are compared with an artifact; export the model first")
        paths.insert(0, Path(reference))
    with progress_display() as progress:
        report = run_tasks(paths, names, options, progress)
    last = report.results[-1]
    files.write(Report(title=f"Tasks of {last.model} {last.recipe}", tasks=report))
    if as_json:
        click.echo(report.model_dump_json())
        return
    show(public_tasks_table(report))
    if report.comparisons:
        show(comparisons_table(report))
