"""`edgekit compare`: differences between two reports that exceed their spread."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit.apps.bench.commands.reports import show, show_notes
from edgekit.commands import json_option


@click.command()
@click.argument("before", type=Path)
@click.argument("after", type=Path)
@json_option("Print the comparison as JSON, and nothing else.")
def command(before: Path, after: Path, as_json: bool) -> int:
    """Compare the reports BEFORE and AFTER, as `edgekit bench -o` or `--json` wrote them.

    A difference within the spread of the two runs does not count, and too few undisturbed trials give no verdict. Exits
    with 5 if something became worse.
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
    return 5 if comparison.is_worse else 0
