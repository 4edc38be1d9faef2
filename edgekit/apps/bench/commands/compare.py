"""`edgekit compare`: differences between two reports that exceed their spread."""

from __future__ import annotations

from pathlib import Path

import click
from pydantic import Field

from edgekit.apps.bench.commands.reports import show, show_notes
from edgekit.commands import json_option, options
from edgekit.common.base import Frozen


class CompareOptions(Frozen):
    fail_on_worse: bool = Field(
        default=False, description="Exit with 6 where something became worse beyond the spread."
    )


@click.command()
@click.argument("before", type=Path)
@click.argument("after", type=Path)
@json_option("Print the comparison as JSON, and nothing else.")
@options(choice=CompareOptions)
def command(before: Path, after: Path, as_json: bool, choice: CompareOptions) -> int:
    """Compare the reports BEFORE and AFTER, as `edgekit bench -o` or `--json` wrote them.

    A difference within the spread of the two runs does not count, and too few undisturbed trials give no verdict.
    """
    from edgekit.apps.bench.report.compare import compare_runs
    from edgekit.apps.bench.report.results import read_report
    from edgekit.apps.bench.report.tables import differences_table

    comparison = compare_runs(read_report(before).measurements, read_report(after).measurements)
    if as_json:
        click.echo(comparison.model_dump_json())
    else:
        show(differences_table(comparison))
        show_notes(comparison.notes)
    return 6 if choice.fail_on_worse and comparison.is_worse else 0
