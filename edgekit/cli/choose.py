"""`edgekit choose`: known models that fit a device: those without an account first, and the largest of them."""

from __future__ import annotations

import json
from typing import Any, Literal

import click
from pydantic import Field

from edgekit.cli._console import console, draw
from edgekit.cli._options import OwnProfiles, SomeFields, json_option, options
from edgekit.cli._progress import progress_display
from edgekit.common.units import show_bytes
from edgekit.contracts.device import DeviceProfile
from edgekit.device.load import load_profile
from edgekit.errors import EdgekitError
from edgekit.model.known_models import KnownModel, known_models
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest

# Column heading → key of a row; a narrow terminal shows fewer columns.
_NARROW = {"model": "model", "size": "size", "licence": "licence", "needs": "needs", "tok/s": "range"}
_COLUMNS = {**_NARROW, "task": "task", "runs as": "as", "context": "context"}
_WIDE = 130
_EMBEDS = "onnx"  # the target whose artifacts give embeddings


class ChooseOptions(OwnProfiles):
    """The device, and the models to choose from."""

    device: str = Field(default="this", description="A device profile by name or path, or `this`.")
    task: Literal["chat", "code", "embed"] | None = Field(
        default=None, description="Only models for this task; without it, models that generate text."
    )
    all: bool = Field(default=False, description="List the models that do not fit too, with the reason.")


@click.command()
@options(choice=ChooseOptions, request=SomeFields(PlanRequest, ("context", "min_tokens_per_second")))
@json_option("JSON instead of a table.")
def command(choice: ChooseOptions, request: PlanRequest, as_json: bool) -> None:
    """List known models that fit a device: licence, memory and speed as `plan` predicts them.

    Models that the hub gives without an account come first, the largest before others.

    The table of models comes with edgekit and is dated; nothing is downloaded.
    """
    table = known_models()
    tasks = {"chat", "code"} if choice.task is None else {choice.task}
    device = load_profile(choice.device, choice.profiles)
    known, rows = [model for model in table.models if tasks & set(model.tasks)], []
    with progress_display() as progress:
        for number, model in enumerate(known):
            progress(number, len(known), f"planning: {model.id}")
            rows.append(_row(model, choice, device, request))
        progress(1, 1, "planning")
    rows.sort(key=lambda row: (row["needs_account"], -row["parameters"]))
    if as_json:
        click.echo(json.dumps({"checked": table.checked, "sources": table.sources, "models": rows}, indent=1))
        return
    fitting = [row for row in rows if row["fits"]]
    budget = device.budget()
    mapped = (
        f" ({show_bytes(budget.total_bytes)} with mapped files)" if budget.private_bytes < budget.total_bytes else ""
    )
    memory = f"{show_bytes(budget.private_bytes)} for one app{mapped}"
    click.echo(f"{choice.device}: {memory}; {len(fitting)} of {len(rows)} known models fit")
    if fitting:
        columns = _COLUMNS if console().width >= _WIDE else _NARROW
        draw(list(columns), [[str(row[name]) for name in columns.values()] for row in fitting])
    if choice.all:
        for row in rows:
            if not row["fits"]:
                click.echo(f"{row['model']}: {row['as']}")
    if any(row["needs_account"] for row in fitting):
        click.echo("* the hub asks to accept the licence first")
    click.echo(f"tok/s: a range; facts of {table.checked}, sources with --json")
    if fitting:
        target = f" --target {_EMBEDS}" if choice.task == "embed" else ""
        click.echo(f"next: edgekit plan {fitting[0]['model']} --device {choice.device}{target}")


def _row(model: KnownModel, choice: ChooseOptions, device: DeviceProfile, request: PlanRequest) -> dict[str, Any]:
    """Plan a model; return its facts with the plan's main figures, or with the reason why it does not run."""
    source = model.source()
    if "embed" in model.tasks:
        request = request.model_copy(update={"target": _EMBEDS})
    parameters = source.spec.parameters
    mark = " *" if model.needs_account else ""
    row = {
        "device": choice.device,
        "memory_bytes": device.ram.value,
        "model": source.given,
        "task": ", ".join(model.tasks),
        "parameters": parameters,
        "size": f"{parameters / 1e9:.2f} B" if parameters >= 0.9995e9 else f"{parameters / 1e6:.0f} M",
        "licence": model.licence + mark,
        "needs_account": model.needs_account,
        "sources": list(model.sources),
    }
    try:
        (plan,) = make_plans(source, [device], request, profiles=choice.profiles)
    except EdgekitError as error:
        return {**row, "fits": False, "as": f"no: {error}"}
    return {
        **row,
        "fits": True,
        "as": plan.built_as,
        "context": f"window {plan.cache.window}" if plan.cache.window else plan.context,
        "needs": show_bytes(plan.estimate.private_bytes),
        "speed": plan.speed.decode_tokens_per_s,
        "range": plan.speed.decode.show(),
        "origin": plan.speed.origin,
        "quality": plan.quality.same_top,
    }
