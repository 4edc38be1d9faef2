"""`edgekit sign`: sign an artifact in the format of OpenSSF Model Signing."""

from __future__ import annotations

import json
from pathlib import Path

import click
from pydantic import Field

from edgekit.apps.delivery.signing import Signer, sign
from edgekit.commands import json_option, options
from edgekit.common.base import Frozen
from edgekit.contracts.manifest import SIGNATURE
from edgekit.errors import InvalidInput


class SigningOptions(Frozen):
    """The signing credentials."""

    key: Path | None = Field(default=None, description="A private key on an elliptic curve, in PEM without a password.")
    certificate: Path | None = Field(default=None, description="The certificate of the key, in PEM.")
    chain: tuple[Path, ...] = Field(
        default=(), description="A certificate between that one and the authority's, in PEM."
    )
    keyless: bool = Field(
        default=False, description="Sign with an account instead of a key, through Sigstore: uses the network."
    )


@click.command()
@click.argument("artifact", type=Path)
@options(choice=SigningOptions)
@json_option("Print the result as JSON.")
def command(artifact: Path, choice: SigningOptions, as_json: bool) -> None:
    """Sign ARTIFACT, after checking every byte of it; the signature is its file model.sig.

    `edgekit verify --signature KEYS` checks it, and so do `edgekit pull --keys` and `edgekit.open`.
    """
    if (choice.key is None) == (not choice.keyless):
        raise InvalidInput("give --key FILE, or --keyless to sign with an account through Sigstore")
    if choice.certificate is None and choice.chain:
        raise InvalidInput("--chain needs --certificate, the certificate of the key")
    if choice.keyless and choice.certificate is not None:
        raise InvalidInput("--keyless uses no certificate; leave out --certificate")
    signed = sign(artifact, Signer(choice.key, choice.certificate, choice.chain))
    if as_json:
        click.echo(json.dumps({"sha256": signed.sha256, "signature": str(signed.folder / SIGNATURE)}))
    else:
        click.echo(f"{artifact}: signed, {len(signed.manifest.files) + 1} files; {signed.folder / SIGNATURE}")
        click.echo(f"sha256 {signed.sha256}")
