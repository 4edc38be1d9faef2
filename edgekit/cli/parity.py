"""`edgekit parity`: a comparison of the artifacts of one model."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit.cli._progress import progress_display


@click.command()
@click.argument("artifacts", nargs=-1, required=True, type=Path)
@click.option("--text", type=Path, help="The text that every artifact reads, instead of the bundled one.")
@click.option(
    "--tokens", type=click.IntRange(16, 1 << 20), default=512, show_default=True, help="Tokens of the text to read."
)
@click.option("--weights/--no-weights", default=True, show_default=True, help="Unpack and compare every weight.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each comparison, a line each.")
def command(artifacts: tuple[Path, ...], text: Path | None, tokens: int, weights: bool, as_json: bool) -> int:
    """Compare ARTIFACTS of one model with the first of them.

    Compares chat templates byte by byte, token ids (with leading special tokens), weights bit for bit, and logits
    after the same tokens. Exits with 5 if a difference is too large.
    """
    from edgekit.measure.parity.check import parity

    with progress_display() as progress:
        comparisons = parity(artifacts, text=text, tokens=tokens, weights=weights, progress=progress)
    for each in comparisons:
        if as_json:
            click.echo(each.model_dump_json())
            continue
        click.echo(f"{each.one} and {each.other}: {'the same model' if each.is_same else 'NOT the same'}")
        for finding in each.findings:
            word = {True: "same", False: "DIFFERS", None: "not compared"}[finding.same]
            click.echo(f"  {finding.what:<12} {word}{': ' if finding.detail else ''}{finding.detail}")
    return 0 if all(each.is_same for each in comparisons) else 5
