"""`edgekit bom`: the bill of materials of an artifact, or its model card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import click
from pydantic import Field

from edgekit import bill_of_materials, model_card, read_artifact as read_manifest
from edgekit.commands import options
from edgekit.common.base import Frozen
from edgekit.common.files import check_output, write_output
from edgekit.common.options import Option


class BomOptions(Frozen):
    """The output options of `bom`."""

    output: Annotated[Path | None, Option(short="o")] = Field(
        default=None, description="Write to this file instead of standard output."
    )
    format: Literal["cyclonedx", "card"] = Field(
        default="cyclonedx", description="CycloneDX ML-BOM 1.7 in JSON, or a model card in Markdown."
    )


@click.command()
@click.argument("artifact", type=Path)
@options(choice=BomOptions)
def command(artifact: Path, choice: BomOptions) -> None:
    """Print what ARTIFACT is made of: model, licence, base, quantisation, calibration, quality, engines and files.

    Facts that the model's source does not state are missing, not guessed. The same artifact gives the same bytes.
    """
    check_output(choice.output)
    opened = read_manifest(artifact)
    make = bill_of_materials if choice.format == "cyclonedx" else model_card
    data = make(opened.manifest, opened.sha256)
    if choice.output is None:
        click.echo(data.decode(), nl=False)
    else:
        write_output(choice.output, data)
        click.echo(f"{choice.output}: {choice.format} of {artifact}")
