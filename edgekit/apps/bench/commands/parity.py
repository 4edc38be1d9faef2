"""`edgekit parity`: a comparison of the artifacts of one model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click
from pydantic import Field

from edgekit.commands import json_option, options, progress_display
from edgekit.common.base import Frozen


class ParityOptions(Frozen):
    """Choose the text on which answers are compared."""

    text: Path | None = Field(
        default=None, description="The text that every artifact reads, instead of the bundled one."
    )
    tokens: Annotated[int, Field(ge=16, le=1 << 20)] = Field(default=512, description="Tokens of the text to read.")


@click.command()
@click.argument("artifacts", nargs=-1, required=True, type=Path)
@options(choice=ParityOptions)
@json_option("Print one JSON object for each comparison, a line each.")
def command(artifacts: tuple[Path, ...], choice: ParityOptions, as_json: bool) -> int:
    """Compare ARTIFACTS of one model with the first of them.

    Compares chat templates byte by byte, token ids (with leading special tokens), weights bit for bit, and logits
    after the same tokens. Exits with 5 if a difference is too large.
    """
    from edgekit.apps.bench.parity import parity

    with progress_display() as progress:
        comparisons = parity(artifacts, text=choice.text, tokens=choice.tokens, progress=progress)
    for each in comparisons:
        if as_json:
            click.echo(each.model_dump_json())
            continue
        click.echo(f"{each.one} and {each.other}: {'the same model' if each.is_same else 'NOT the same'}")
        for finding in each.findings:
            word = {True: "same", False: "DIFFERS", None: "not compared"}[finding.same]
            click.echo(f"  {finding.what:<12} {word}{': ' if finding.detail else ''}{finding.detail}")
    return 0 if all(each.is_same for each in comparisons) else 5
