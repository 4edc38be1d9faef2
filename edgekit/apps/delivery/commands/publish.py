"""`edgekit publish`: writes artifacts as a static site that any file server or object store can host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import click
from pydantic import Field

from edgekit.apps.delivery.publish import publish, withdraw
from edgekit.apps.delivery.signing import Signer
from edgekit.apps.delivery.site_index import PublishedArtifact
from edgekit.commands import json_option, options, progress_display
from edgekit.common.base import Frozen
from edgekit.common.bounds import Share
from edgekit.common.options import Option
from edgekit.errors import InvalidInput, printable


class PublishOptions(Frozen):
    """The site, the release, and the devices and installations that get it."""

    output: Annotated[Path, Option(short="o")] = Field(description="The folder of the site; created if missing.")
    release: str = Field(description="The release, such as 1.2: a new one, or one to add to or change.")
    channel: str = Field(default="stable", description="The channel, such as stable or beta.")
    only: tuple[str, ...] = Field(
        default=(), description="A pattern of device profiles that these artifacts are for, such as 'pixel-*'."
    )
    rollout: Share | None = Field(
        default=None, description="The share of installations that get the release, 0 to 1; it can be raised later."
    )
    withdraw: bool = Field(default=False, description="Withdraw the release: installations return to the previous one.")
    key: Path | None = Field(default=None, description="Sign the index with this private key (PEM).")
    certificate: Path | None = Field(default=None, description="The certificate of the key.")


@click.command()
@click.argument("artifacts", nargs=-1, type=Path)
@options(choice=PublishOptions)
@json_option("Print progress and the result as JSON lines.")
def command(artifacts: tuple[Path, ...], choice: PublishOptions, as_json: bool) -> None:
    """Add ARTIFACTS to a release of a site, best first; `edgekit pull` fetches the first that a device can run.

    The site is a folder of plain files: copy it to any file server or object store. Files that artifacts share are
    stored once. Without ARTIFACTS, change the roll-out of a release or withdraw it.
    """
    if choice.certificate is not None and choice.key is None:
        raise InvalidInput("--certificate needs --key, the private key of the certificate")
    signer = Signer(choice.key, choice.certificate) if choice.key else None
    if choice.withdraw:
        if artifacts or choice.rollout is not None or choice.only:
            raise InvalidInput("--withdraw takes no artifacts, --rollout or --only; leave them out")
        with progress_display(as_json) as progress:
            index = withdraw(
                choice.output, release=choice.release, channel=choice.channel, signer=signer, progress=progress
            )
    else:
        with progress_display(as_json) as progress:
            index = publish(
                artifacts,
                choice.output,
                release=choice.release,
                channel=choice.channel,
                devices=choice.only,
                rollout=choice.rollout,
                signer=signer,
                progress=progress,
            )
    release = next(each for each in index.channel(choice.channel) if each.name == choice.release)
    if as_json:
        click.echo(json.dumps({"event": "published", "sequence": index.sequence, **release.model_dump(mode="json")}))
        return
    state = "withdrawn" if release.withdrawn else f"for {release.rollout:.0%} of installations"
    click.echo(f"{choice.output}: release {release.name} of {choice.channel}, {state}; index {index.sequence}")
    for each in release.artifacts:
        click.echo(f"  {printable(_line(each))}")
    if not all(each.has_chunks for each in release.artifacts):
        click.echo("  note: an artifact lists no chunks; export it again, so that updates fetch only what changed")


def _line(each: PublishedArtifact) -> str:
    devices = ", ".join(each.devices) or "any device that it fits"
    signed = "signed" if each.signature_sha256 else "unsigned"
    return f"{each.sha256[:12]} {each.model} {each.target} {each.backend} {each.recipe}, {signed}, for {devices}"
