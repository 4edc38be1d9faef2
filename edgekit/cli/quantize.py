"""`edgekit quantize`: converts a float model to neutral weights, which every target packs."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import click
from pydantic import Field

import edgekit
from edgekit.api import QuantizeOptions
from edgekit.cli._options import CALIBRATION, SectionedCommand, SomeFields, json_option, options
from edgekit.cli._progress import progress_display, reporter
from edgekit.common.base import Frozen
from edgekit.common.options import Option
from edgekit.common.units import show_bytes
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.recipe import bits_per_weight, weight_bytes


class QuantizeFiles(Frozen):
    """The recipe and the folder to write."""

    recipe: Annotated[str | None, Option(short="r")] = Field(
        default=None,
        description="A name such as s4-g32, or a YAML file of rules; without it, `keep` for a quantised model, which"
        " keeps its integers, s8 with --effort quick, else balanced.",
    )
    output: Annotated[Path, Option(short="o")] = Field(description="The folder to write; it must not exist.")


_EXAMPLES = """\b
Examples:
  edgekit quantize ./model --recipe s4-g32 --calibrate my-chats.jsonl -o weights
"""


@click.command(cls=SectionedCommand, epilog=_EXAMPLES)
@click.argument("model")
@options(choice=QuantizeFiles, calibrating=SomeFields(QuantizeOptions, (*CALIBRATION, "bits_per_weight")))
@json_option("Print progress and the result as JSON lines.")
def command(model: str, choice: QuantizeFiles, calibrating: QuantizeOptions, as_json: bool) -> None:
    """Quantise MODEL once, into integers and scales that every target packs without rounding again.

    If MODEL is quantised already (Q4_K, Q4_1, W4A16, GPTQ, AWQ, MLX), its integers are kept, unless --recipe says
    otherwise.

    MODEL is a Hugging Face folder, a .gguf file, a hub id, or `demo`. Calibrated, gptq chooses the integers; with
    --effort quick they are rounded to the nearest. Weights that an earlier run made are taken from the store, and an
    interrupted run continues where it stopped.
    """
    try:
        with progress_display(as_json) as progress:
            chosen = calibrating.model_copy(update={"report": reporter(progress)})
            weights = edgekit.quantize(model, choice.recipe, choice.output, chosen)
    except KeyboardInterrupt:
        click.echo("edgekit: finished layers are kept; the same command continues from there", err=True)
        raise
    facts = _facts(weights, choice.output)
    click.echo(json.dumps({"event": "done", **facts}) if as_json else _summary(facts))


def _facts(weights: NeutralWeights, output: Path) -> dict[str, Any]:
    manifest = weights.manifest
    return {
        "path": str(output),
        "model": weights.model.name,
        "recipe": weights.recipe.name,
        "method": manifest.method,
        "calibration": manifest.calibration.description if manifest.calibration else None,
        "bits_per_weight": round(bits_per_weight(weights.model, weights.recipe), 4),
        "weight_bytes": weight_bytes(weights.model, weights.recipe),
        "sha256": weights.sha256,
        "notes": list(manifest.notes),
    }


def _summary(facts: dict[str, Any]) -> str:
    text = f" on {facts['calibration']}" if facts["calibration"] else ""
    by = "" if facts["method"] == "kept" else f" by {facts['method']}{text}"
    lines = [
        f"{facts['path']}: {facts['model']} as {facts['recipe']}{by}",
        f"  {facts['bits_per_weight']:.3f} bits per weight, {show_bytes(facts['weight_bytes'])}",
        f"  sha256 {facts['sha256']}",
        *(f"  note: {note}" for note in facts["notes"]),
        f"next: edgekit inspect {quote(facts['path'])}",
    ]
    return "\n".join(lines)
