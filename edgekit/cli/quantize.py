"""`edgekit quantize`: from a float model to neutral weights, which every target packs."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

import click

from edgekit.artifact import staging_for
from edgekit.cli._calibrating import calibration_for
from edgekit.cli._progress import progress_display
from edgekit.errors import InvalidInput
from edgekit.files import copy_file, disk_full, sync_folder
from edgekit.planning import find_recipe
from edgekit.recipe import Recipe, bits_per_weight, weight_bytes
from edgekit.source import ModelSource, open_source
from edgekit.store import Store
from edgekit.units import show_bytes
from edgekit.weights.calibration import LENGTH, MAX_SEQUENCES, SEQUENCES
from edgekit.weights.neutral import MANIFEST, NeutralWeights


@click.command()
@click.argument("model")
@click.option("--recipe", "-r", "recipe_name", required=True, help="A name such as s4-g32, or a YAML file of rules.")
@click.option("--output", "-o", type=Path, required=True, help="The folder to write; it must not exist.")
@click.option("--calibrate", type=Path, help="Text, jsonl of texts or chats, or .npy tokens; `default`: ours.")
@click.option("--method", type=click.Choice(["rtn", "gptq", "awq"]), help="How integers are chosen.")
@click.option(
    "--samples", type=click.IntRange(1, MAX_SEQUENCES), default=SEQUENCES, show_default=True, help="Sequences of text."
)
@click.option("--sample-length", type=click.IntRange(2), default=LENGTH, show_default=True, help="Tokens in each.")
@click.option("--bits-per-weight", type=float, help="Let the most sensitive linears climb to s8 up to this average.")
@click.option("--handover", is_flag=True, help="Keep embedding and head in float, for servers' loaders.")
@click.option("--store", type=Path, help="Where neutral weights are kept, instead of the user's cache.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads, instead of one a core.")
@click.option("--json", "as_json", is_flag=True, help="Print progress and the result as JSON lines.")
def command(
    model: str,
    recipe_name: str,
    output: Path,
    calibrate: Path | None,
    method: Any,
    samples: int,
    sample_length: int,
    bits_per_weight: float | None,
    handover: bool,
    store: Path | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Quantise MODEL once, into integers and scales that every target packs without rounding again.

    MODEL is a Hugging Face folder, a hub id, or `demo`. With --calibrate, gptq; without, rtn. What was made before is
    found again, and what was interrupted goes on where it stood.
    """
    from edgekit.weights.quantise import need_torch, neutral_weights

    _refuse_existing(output)
    source = open_source(model, need_weights=True)
    need_torch()
    recipe = _recipe(recipe_name, bits_per_weight, handover, source)
    calibration = calibration_for(calibrate, source, sequences=samples, length=sample_length)
    if calibration is None and not recipe.is_exact() and not as_json:
        click.echo("edgekit: no calibration text, so rtn; gptq is closer: --calibrate FILE or default", err=True)
    _use_threads(threads)
    try:
        with progress_display(as_json) as progress:
            weights = neutral_weights(
                source,
                recipe,
                method=method,
                calibration=calibration,
                store=Store(store) if store else None,
                progress=progress,
            )
            copy(weights, output)
    except KeyboardInterrupt:
        click.echo("edgekit: the layers that are done are kept; the same command goes on from there", err=True)
        raise
    facts = _facts(weights, output)
    click.echo(json.dumps({"event": "done", **facts}) if as_json else _summary(facts))


def _recipe(name: str, budget: float | None, is_handover: bool, source: ModelSource) -> Recipe:
    from edgekit.weights.handover import handover, refuse_split

    recipe = find_recipe(name)
    if is_handover:
        recipe = handover(recipe)
        refuse_split(source.spec, recipe)
    if budget is not None:
        least = bits_per_weight(source.spec, recipe)
        if not least <= budget <= 32:
            raise InvalidInput(
                f"--bits-per-weight {budget:g}: {recipe.name} alone takes {least:.2f} of {source.name}; "
                "give more, or a recipe with larger groups"
            )
        recipe = recipe.model_copy(update={"name": f"{recipe.name}-to-{budget:g}", "bits_per_weight": budget})
    return recipe


def _use_threads(threads: int | None) -> None:
    if threads is not None and find_spec("torch") is not None:  # without it, making weights says so itself
        import torch

        torch.set_num_threads(threads)


def _refuse_existing(output: Path) -> None:
    if output.exists() or output.is_symlink():
        raise InvalidInput(f"{output}: exists already; nothing is overwritten: choose another path or remove it")


def copy(weights: NeutralWeights, output: Path) -> None:
    """The folder from the store, whole or not at all, whatever happens meanwhile."""
    names = [*weights.manifest.files, MANIFEST]
    needed = sum((weights.folder / name).stat().st_size for name in names)
    staging = staging_for(output, needed)
    try:
        with disk_full(output, needed):
            for name in names:
                copy_file(weights.folder / name, staging / name)
            sync_folder(staging)
        _refuse_existing(output)
        staging.rename(output)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    sync_folder(output.parent)


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
    lines = [
        f"{facts['path']}: {facts['model']} as {facts['recipe']} by {facts['method']}{text}",
        f"  {facts['bits_per_weight']:.3f} bits per weight, {show_bytes(facts['weight_bytes'])}",
        f"  sha256 {facts['sha256']}",
        *(f"  note: {note}" for note in facts["notes"]),
        f"next: edgekit inspect {quote(facts['path'])}",
    ]
    return "\n".join(lines)
