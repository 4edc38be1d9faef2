"""`edgekit pull`: keep a folder at the newest release of a site."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import click
from pydantic import Field

from edgekit.apps.delivery.pull import pull
from edgekit.commands import json_option, options, progress_display
from edgekit.common.base import Frozen
from edgekit.common.options import ByteCount, Option
from edgekit.common.units import show_bytes


class PullOptions(Frozen):
    """The options of `pull`."""

    output: Annotated[Path, Option(short="o")] = Field(
        description="The folder to keep up to date; usable wherever a command takes an artifact."
    )
    channel: str = Field(default="stable", description="The channel to follow.")
    device: str = Field(default="this", description="A device profile by name or path, or `this`.")
    keys: Path | None = Field(
        default=None, description="Trusted public keys or certificates (a PEM file or a folder); require a signature."
    )
    reuse: tuple[Path, ...] = Field(default=(), description="An artifact on the disk whose chunks may be copied.")
    keep: Annotated[ByteCount, Field(ge=0)] | None = Field(
        default=None, description="Disk space for artifacts no longer in use, e.g. 2GiB.  [default: the former one]"
    )
    timeout: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] = Field(
        default=30.0, description="Seconds without data after which the server counts as stalled."
    )
    allow: tuple[Literal["http", "file"], ...] = Field(
        default=(), description="Allow a URL that begins with http: or file:."
    )


@click.command()
@click.argument("url")
@options(choice=PullOptions)
@json_option("Print progress and the result as JSON lines.")
def command(url: str, choice: PullOptions, as_json: bool) -> None:
    """Fetch the newest release at URL for this device; only chunks that are not on the disk are fetched.

    An interrupted pull continues where it stopped. The folder switches to the new artifact atomically, after every
    byte was checked, and keeps the former one for `edgekit rollback`. No other server is contacted.
    """
    with progress_display(as_json) as progress:
        pulled = pull(
            url,
            choice.output,
            channel=choice.channel,
            device=choice.device,
            keys=choice.keys,
            reuse=choice.reuse,
            allow=choice.allow,
            timeout_s=choice.timeout,
            keep_bytes=choice.keep,
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps({"event": "pulled", **pulled._asdict(), "folder": str(pulled.folder)}))
        return
    if pulled.skipped is not None:
        click.echo(f"{choice.output}: release {pulled.skipped} was rolled back here; {pulled.release} stays")
    elif not pulled.is_new:
        click.echo(f"{choice.output}: release {pulled.release} is in use already")
    else:
        click.echo(
            f"{choice.output}: release {pulled.release}, {show_bytes(pulled.fetched_bytes)} fetched and"
            f" {show_bytes(pulled.reused_bytes)} found on the disk"
        )
    click.echo(f"sha256 {pulled.sha256}")
    if pulled.is_new:
        click.echo(f"next: edgekit chat {choice.output}")
