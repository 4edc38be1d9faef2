"""`edgekit export`: from a model and devices to sealed artifacts."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from typing import Any

import click

from edgekit.artifact import Artifact
from edgekit.cli._calibrating import calibration_for
from edgekit.cli._options import make_wish, wish_options
from edgekit.cli._progress import progress_display
from edgekit.errors import InvalidInput
from edgekit.plan import Plan
from edgekit.planning import make_plans, read_plan
from edgekit.source import open_source
from edgekit.store import Store
from edgekit.units import show_bytes


@click.command()
@click.argument("model")
@click.option(
    "--device", "devices", multiple=True, help="A device profile; may be given several times.  [default: this]"
)
@click.option(
    "--output", "-o", type=Path, required=True, help="The artifact to write; with several devices, the folder."
)
@click.option("--plan", "plan_file", type=Path, help="Build this plan, as `edgekit plan -o` wrote it.")
@click.option("--calibrate", type=Path, help="Text, jsonl of texts or chats, or .npy tokens; `default`: ours.")
@click.option("--method", type=click.Choice(["rtn", "gptq", "awq"]), help="How integers are chosen.")
@click.option("--store", type=Path, help="Where neutral weights are kept, instead of the user's cache.")
@wish_options
@click.option("--json", "as_json", is_flag=True, help="Print progress and results as JSON lines.")
def command(
    model: str,
    devices: tuple[str, ...],
    output: Path,
    plan_file: Path | None,
    calibrate: Path | None,
    method: Any,
    store: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Build the artifact of MODEL for each device, check it, and seal it.

    MODEL is a Hugging Face folder, a hub id, or `demo`. Several devices share one quantisation. What was interrupted
    goes on where it stood; an artifact that exists is never overwritten.
    """
    from edgekit.export import export_all

    plans = _plans(model, devices, plan_file, options)
    with progress_display(as_json) as progress:
        calibration = calibration_for(calibrate, open_source(model)) if calibrate else None
        made = export_all(
            plans,
            output,
            calibration=calibration,
            method=method,
            store=Store(store) if store else None,
            progress=progress,
        )
    for artifact in made:
        if as_json:
            click.echo(json.dumps(_facts(artifact)))
        else:
            _print(artifact)
    if not as_json:
        first = quote(str(made[0].folder))
        click.echo(f'next: edgekit run {first} "def fibonacci(n):" --stats')


def _plans(model: str, devices: tuple[str, ...], plan_file: Path | None, options: dict[str, Any]) -> tuple[Plan, ...]:
    if plan_file is None:
        return make_plans(
            model,
            devices or ("this",),
            make_wish(options),
            draft=options["draft"],
            per_device=options["per_device"],
            profiles=options["profiles"],
        )
    given = [name for name, value in options.items() if value and (name, value) not in _DEFAULTS]
    if devices or given:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in (["device"] if devices else []) + given)
        raise InvalidInput(f"--plan {plan_file} decides everything; leave away {named}, or leave away --plan")
    plan = read_plan(plan_file)
    found = open_source(model).config_sha256
    if found != plan.model_sha256:
        raise InvalidInput(
            f"--plan {plan_file} was made for {plan.model_source}, and {model} is another model; plan again"
        )
    return (plan.model_copy(update={"model_source": model}),)


_DEFAULTS = {("sequences", 1), ("prefer", "balanced")}


def _facts(artifact: Artifact) -> dict[str, Any]:
    plan = artifact.plan
    return {
        "event": "sealed",
        "path": str(artifact.folder),
        "sha256": artifact.sha256,
        "weights_sha256": artifact.manifest.weights_sha256,
        "device": plan.device,
        "target": plan.target,
        "backend": plan.backend,
        "recipe": plan.recipe.name,
        "bytes": sum(fact.bytes for fact in artifact.manifest.files.values()),
        "predicted_bytes": plan.estimate.total_bytes,
        "predicted_tokens_per_s": plan.speed.decode_tokens_per_s,
        "self_check": artifact.manifest.self_check,
    }


def _print(artifact: Artifact) -> None:
    plan = artifact.plan
    size = sum(fact.bytes for fact in artifact.manifest.files.values())
    click.echo(
        f"{artifact.folder}: {plan.model.name} for {plan.device} as {plan.target} {plan.backend} {plan.recipe.name}"
    )
    click.echo(f"  {len(artifact.manifest.files)} files, {show_bytes(size)}, sha256 {artifact.sha256}")
    click.echo(f"  self-check: {artifact.manifest.self_check}")
    click.echo(
        f"  predicted: {show_bytes(plan.estimate.total_bytes)} of memory for {plan.context:,} tokens,"
        f" {plan.speed.decode_tokens_per_s:g} tok/s"
    )
    for note in plan.notes:
        click.echo(f"  note: {note}")
