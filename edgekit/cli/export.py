"""`edgekit export`: from a model and devices to sealed artifacts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import click
from pydantic import Field

from edgekit.api import build
from edgekit.artifact.artifact import Artifact
from edgekit.artifact.export import ExportOptions, check_place
from edgekit.cli._console import wrapped
from edgekit.cli._options import CALIBRATION, PlanDevices, SectionedCommand, SomeFields, as_typed, json_option, options
from edgekit.cli._progress import announce, progress_display, reporter
from edgekit.cli._rejected import plans_that_fit, together
from edgekit.common.base import Frozen
from edgekit.common.options import Option
from edgekit.common.units import show_bytes
from edgekit.contracts.plan import Plan
from edgekit.errors import EdgekitError, InvalidInput
from edgekit.model.source import BUNDLED, ModelSource, open_source
from edgekit.planner.make import make_plans, read_plan
from edgekit.planner.request import PlanRequest


class ExportFiles(Frozen):
    """The files of `export`."""

    output: Annotated[Path, Option(short="o")] = Field(
        description="The artifact to write; with several devices, the folder that holds one for each."
    )
    plan: Path | None = Field(default=None, description="Build this plan, as `edgekit plan -o` wrote it.")


_EXAMPLES = """\b
Examples:
  edgekit export Qwen/Qwen3-0.6B --device this -o my-artifact
  edgekit export ./model --device pixel-9 --context 2048 --recipe s4-g32 -o phone
"""


@click.command(cls=SectionedCommand, epilog=_EXAMPLES)
@click.argument("model")
@options(
    devices=PlanDevices,
    files=ExportFiles,
    added=SomeFields(ExportOptions, ("adapters", "with_bom", "prepare")),
    calibrating=SomeFields(ExportOptions, CALIBRATION),
    request=PlanRequest,
)
@json_option("Print progress and results as JSON lines.")
def command(
    model: str,
    devices: PlanDevices,
    files: ExportFiles,
    added: ExportOptions,
    calibrating: ExportOptions,
    request: PlanRequest,
    as_json: bool,
) -> int:
    """Build the artifact of MODEL for each device, check it, and seal it.

    MODEL is a Hugging Face folder, a .gguf file, a hub id, or `demo`. Several devices share one quantisation. An
    interrupted export continues where it stopped; an artifact that exists is never overwritten.
    """
    are_several = len(devices.names()) > 1
    if not are_several:
        check_place(files.output)  # with several devices, every plan names its own path
    source = open_source(model).with_own_integers()
    plans, unfit = plans_that_fit(
        lambda names: _plans(source, devices, names, request, files.plan, calibrating), devices.names()
    )
    if not plans:
        raise together(unfit)
    with progress_display(as_json) as progress:
        chosen = calibrating.model_dump(include=set(CALIBRATION)) | {"report": reporter(progress)}
        jobs = [(plan, files.output / plan.device if are_several else files.output) for plan in plans]
        made, refused = build(source, jobs, added.model_copy(update=chosen), partly=True)
    refused |= unfit
    for artifact in made:
        if as_json:
            click.echo(json.dumps(_facts(artifact)))
        else:
            _print(artifact)
    if not as_json:
        click.echo(f"next: edgekit {_next(made[0])}")
    for device, error in refused.items():
        if as_json:
            click.echo(json.dumps({"event": "refused", "device": device, "error": str(error)}))
        else:
            reason = str(error).removeprefix(f"{device}: ")
            click.echo(f"edgekit: not built for {device}: {reason}", err=True)
    return EdgekitError.exit_code if refused else 0


def _plans(
    source: ModelSource,
    devices: PlanDevices,
    names: list[str],
    request: PlanRequest,
    file: Path | None,
    chosen_by: ExportOptions,
) -> list[Plan]:
    if file is None:
        return list(
            make_plans(
                source,
                names,
                request,
                draft=devices.draft,
                profiles=devices.profiles,
                announce=announce,
                chosen_by=chosen_by,
            )
        )
    given = dict.fromkeys(word for word in as_typed("devices", "request") if word.startswith("--"))
    if given:
        raise InvalidInput(f"--plan {file} decides everything; leave out {', '.join(given)}, or leave out --plan")
    plan = read_plan(file)
    if source.config_sha256 != plan.model_sha256:
        raise InvalidInput(
            f"--plan {file} was made for {plan.model_source}, and {source.given} is another model; plan again"
        )
    return [plan.model_copy(update={"model_source": source.given})]


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
        "range": plan.speed.decode.show(),
        "origin": plan.speed.origin,
        "self_check": artifact.manifest.self_check,
    }


def _print(artifact: Artifact) -> None:
    plan = artifact.plan
    size = sum(fact.bytes for fact in artifact.manifest.files.values())
    lines = [
        f"{artifact.folder}: {plan.model.name} for {plan.device} as {plan.built_as}",
        f"  {len(artifact.manifest.files)} files, {show_bytes(size)}, sha256 {artifact.sha256}",
        f"  self-check: {artifact.manifest.self_check}",
        f"  predicted: {show_bytes(plan.estimate.private_bytes)} of private memory for {plan.context:,} tokens,"
        f" {plan.speed.show()}",
        *(f"  note: {note}" for note in plan.all_notes),
    ]
    click.echo(wrapped("\n".join(lines), 4, out=sys.stdout))


def _next(artifact: Artifact) -> str:
    """The command that tries the artifact: a chat where the model holds one, which the bundled models do not."""
    if artifact.plan.model.reranking:
        return f"rerank {quote(str(artifact.folder))} LINES.jsonl"
    if artifact.plan.model.encoder:
        return f"embed {quote(str(artifact.folder))} TEXTS.txt"
    from edgekit.runtime.generation.chat_template import read_template

    folder = quote(str(artifact.folder))
    template = read_template(artifact.folder)
    template.close()
    can_chat = template.exists and artifact.plan.model_source not in BUNDLED
    return f"chat {folder}" if can_chat else f'run {folder} "def fibonacci(n):" --raw --stats'
