"""`edgekit rollback`: return a pulled folder to its former artifact."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgekit.apps.delivery.installation import rollback
from edgekit.commands import json_option, progress_display
from edgekit.contracts.installed import read_installed


@click.command()
@click.argument("folder", type=Path)
@json_option("Print the result as JSON.")
def command(folder: Path, as_json: bool) -> None:
    """Return FOLDER, which `edgekit pull` filled, to its former artifact, after checking every byte of it.

    `pull` does not install the abandoned artifact again, only a newer release.
    """
    with progress_display() as progress:
        artifact = rollback(folder, progress)
    installed = read_installed(folder)
    assert installed is not None and installed.current is not None
    if as_json:
        click.echo(json.dumps({"release": installed.current.release, "sha256": artifact.sha256}))
    else:
        click.echo(f"{folder}: back to release {installed.current.release}, sha256 {artifact.sha256}")
