"""`edgekit verify`: is an artifact whole, and is it the one that was meant?"""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgekit.artifact import verify
from edgekit.units import show_bytes


@click.command()
@click.argument("artifact", type=Path)
@click.option("--expect", help="The sha256 that the artifact must have: checks its origin, not only that it is whole.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(artifact: Path, expect: str | None, as_json: bool) -> None:
    """Check every byte of ARTIFACT against its manifest.

    A manifest proves that nothing was damaged; only --expect, with a hash that reached you another way, proves where it
    comes from.
    """
    found = verify(artifact, expect=expect)
    size = sum(fact.bytes for fact in found.manifest.files.values())
    if as_json:
        facts = {
            "sha256": found.sha256,
            "files": len(found.manifest.files),
            "bytes": size,
            "origin_checked": bool(expect),
        }
        click.echo(json.dumps(facts))
        return
    origin = "and is the one expected" if expect else "its origin was not checked (--expect SHA256 does)"
    click.echo(f"{artifact}: whole, {len(found.manifest.files)} files, {show_bytes(size)}; {origin}")
    click.echo(f"sha256 {found.sha256}")
