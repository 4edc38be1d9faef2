"""`edgekit doctor`: the state of the installed libraries and of this machine, with a fix for each fault."""

from __future__ import annotations

import click

from edgekit.cli._console import console as new_console
from edgekit.cli._options import json_option
from edgekit.doctor import Diagnosis, examine

_STYLES = {"works": "green", "installed": "green", "missing": "dim", "conflict": "bold red", "broken": "bold red"}


@click.command(name="doctor")
@json_option("JSON instead of a table.")
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """Check the installed libraries and this machine, and print the command that fixes each fault.

    Vendor libraries are tried in child processes. The exit code is 1 if an installed library conflicts with another or
    is broken; a missing library is no fault.
    """
    diagnosis = examine()
    if as_json:
        click.echo(diagnosis.model_dump_json(indent=1))
    else:
        _print(diagnosis)
    context.exit(0 if diagnosis.is_healthy else 1)


def _print(diagnosis: Diagnosis) -> None:
    from rich.table import Table
    from rich.text import Text

    console = new_console()
    console.print(f"Python {diagnosis.python}, {diagnosis.platform}")
    console.print("installed: " + ", ".join(f"{name} {version}" for name, version in diagnosis.versions.items()))
    machine = diagnosis.machine
    if machine is not None:
        budget = machine.budget()
        levels = ", ".join(machine.simd) or "no vector instructions known"
        console.print(f"machine: {machine.chip}, {machine.cpu_cores} cores, {levels}")
        console.print(
            f"memory: {budget.why}; reads {machine.usable_bandwidth_gb_s.value:g} GB/s"
            f" ({machine.usable_bandwidth_gb_s.confidence})"
        )
        for note in machine.notes:
            console.print(f"note: {note}")
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("what", "state", "found"):
        table.add_column(heading, no_wrap=heading != "found")
    for finding in diagnosis.findings:
        table.add_row(finding.subject, Text(finding.status, style=_STYLES[finding.status]), finding.found)
    console.print(table)
    cures: dict[str, list[str]] = {}
    for finding in diagnosis.findings:
        if finding.cure:
            cures.setdefault(finding.cure, []).append(finding.subject)
    if cures:
        console.print("\nCures")
        for cure, subjects in cures.items():
            console.print(f"  {', '.join(subjects)}: {cure}", soft_wrap=True)
    for note in diagnosis.notes:
        console.print(f"\nNote: {note}")
    console.print(
        "\nNothing conflicts." if diagnosis.is_healthy else "\nSomething installed cannot be used: see the cures."
    )
