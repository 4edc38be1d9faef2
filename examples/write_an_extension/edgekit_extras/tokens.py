"""`edgekit tokens`: count the tokens of a text file, as a model reads it."""

from __future__ import annotations

import json
from pathlib import Path

import click

import edgekit
from edgekit.commands import json_option


@click.command()
@click.argument("artifact", type=Path)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option("Print the count as JSON.")
def command(artifact: Path, file: Path, as_json: bool) -> None:
    """Count the tokens of FILE, as ARTIFACT reads it."""
    codec = edgekit.read_codec(edgekit.open_artifact(artifact).folder)
    count = len(codec.encode(file.read_text(), add_special_tokens=False))
    click.echo(json.dumps({"tokens": count}) if as_json else f"{file}: {count:,} tokens")
