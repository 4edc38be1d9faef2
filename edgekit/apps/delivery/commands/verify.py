"""`edgekit verify`: checks an artifact's integrity and, with a hash or keys, its origin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import click
from pydantic import Field

from edgekit import verify
from edgekit.apps.delivery.signing import KeylessIdentity, check_signature
from edgekit.commands import json_option, options
from edgekit.common.base import Frozen
from edgekit.common.options import Option
from edgekit.common.units import show_bytes
from edgekit.errors import InvalidInput


class VerifyOptions(Frozen):
    """The trusted hash and the trusted signers."""

    expect: str | None = Field(
        default=None, description="The sha256 that the artifact must have; checks its origin, not only its integrity."
    )
    signature: Annotated[Path | None, Option(metavar="KEYS")] = Field(
        default=None, description="Check the signature too: a public key or certificate (PEM), or a folder of them."
    )
    identity: str | None = Field(
        default=None,
        description="Check a keyless signature: the account that must have signed; uses the network.",
    )
    identity_provider: str | None = Field(default=None, description="URL of the account's OpenID Connect provider.")

    def trusted(self) -> Path | KeylessIdentity | None:
        if (self.identity is None) != (self.identity_provider is None):
            raise InvalidInput("--identity and --identity-provider belong together; give both")
        if self.identity is not None and self.identity_provider is not None:
            if self.signature is not None:
                raise InvalidInput("--signature checks a key and --identity an account; give one")
            return KeylessIdentity(self.identity, self.identity_provider)
        return self.signature


@click.command()
@click.argument("artifact", type=Path)
@options(choice=VerifyOptions)
@json_option("Print the result as JSON.")
def command(artifact: Path, choice: VerifyOptions, as_json: bool) -> None:
    """Check every byte of ARTIFACT against its manifest, and the manifest against its seal.

    This proves integrity. Origin is proved by --expect, with a hash from a source that you trust, or by --signature,
    with keys that you trust. Artifacts of older versions of edgekit have no seal.
    """
    trusted = choice.trusted()
    checked = verify(artifact, expect=choice.expect)
    signer = check_signature(checked.folder, trusted) if trusted is not None else None
    size = sum(fact.bytes for fact in checked.manifest.files.values())
    if as_json:
        facts = {
            "sha256": checked.sha256,
            "files": len(checked.manifest.files),
            "bytes": size,
            "sealed": checked.is_sealed,
            "origin_checked": bool(choice.expect or signer),
            "signed_by": signer,
        }
        click.echo(json.dumps(facts))
        return
    origin = "and is the one expected" if choice.expect else "its origin was not checked (--expect and --signature do)"
    if signer:
        origin = f"signed by {signer}" + (", and is the one expected" if choice.expect else "")
    click.echo(f"{artifact}: whole, {len(checked.manifest.files)} files, {show_bytes(size)}; {origin}")
    if not checked.is_sealed:
        click.echo("unsealed: an older edgekit wrote its manifest, so damage to the manifest itself cannot be seen")
    click.echo(f"sha256 {checked.sha256}")
