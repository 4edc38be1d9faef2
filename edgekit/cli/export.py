"""`edgekit export`: from a model and devices to sealed artifacts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import click
from pydantic import Field

from edgekit.api import prepare_openings, refuse_other_devices
from edgekit.artifact.artifact import Artifact
from edgekit.artifact.export import check_export, check_place, export_all, places_for
from edgekit.cli._calibration import Calibrating, announce, calibration_of
from edgekit.cli._console import wrapped
from edgekit.cli._options import PlanDevices, SectionedCommand, adapters_of, as_typed, json_option, options
from edgekit.cli._progress import progress_display
from edgekit.common.base import Frozen
from edgekit.common.options import Option
from edgekit.common.units import show_bytes
from edgekit.contracts.neutral import weights_store
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
    adapters: Annotated[tuple[str, ...], Option(name="adapter", metavar="NAME=PATH")] = Field(
        default=(),
        description="A LoRA adapter (a PEFT folder) to seal with the model (run --adapter NAME); needs --adapter-rank.",
    )
    with_bom: bool = Field(
        default=False, description="Add a bill of materials (CycloneDX) and a model card to the artifact."
    )
    prepare: bool = Field(
        default=False,
        description="Open the artifact once, so that no later opening on this machine has to pack weights.",
    )


_EXAMPLES = """\b
Examples:
  edgekit export Qwen/Qwen3-0.6B --device this -o my-artifact
  edgekit export ./model --device pixel-9 --context 2048 --recipe s4-g32 -o phone
"""


@click.command(cls=SectionedCommand, epilog=_EXAMPLES)
@click.argument("model")
@options(devices=PlanDevices, files=ExportFiles, calibrating=Calibrating, request=PlanRequest)
@json_option("Print progress and results as JSON lines.")
def command(
    model: str,
    devices: PlanDevices,
    files: ExportFiles,
    calibrating: Calibrating,
    request: PlanRequest,
    as_json: bool,
) -> int:
    """Build the artifact of MODEL for each device, check it, and seal it.

    MODEL is a Hugging Face folder, a .gguf file, a hub id, or `demo`. Several devices share one quantisation. An
    interrupted export continues where it stopped; an artifact that exists is never overwritten.
    """
    adapters = adapters_of(files.adapters)
    if len(devices.names()) == 1:
        check_place(files.output)  # with several devices, every plan names its own path
    source = open_source(model).with_own_integers()
    plans = _plans(source, devices, request, files.plan)
    if files.prepare:
        refuse_other_devices(plans)
    ready, refused = _checked(plans, files.output, source)
    made: list[Artifact] = []
    with progress_display(as_json) as progress:
        progress(0, 1, "reading the model")
        calibration = calibration_of(calibrating, source, [plan.recipe for plan, _ in ready])
        progress(1, 1, "reading the model")
        progress(0, 1, "neutral weights: loading")
        for plan, place in ready:
            made += export_all(
                [plan],
                place,
                source=source,
                calibration=calibration,
                method=calibrating.method,
                compute=calibrating.compute,
                store=weights_store(calibrating.store),
                adapters=adapters,
                with_bom=files.with_bom,
                announce=announce,
                progress=progress,
            )
        if files.prepare:
            prepare_openings(made, progress)
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
            click.echo(f"edgekit: not built for {device}: {error}", err=True)
    return EdgekitError.exit_code if refused else 0


def _plans(source: ModelSource, devices: PlanDevices, request: PlanRequest, file: Path | None) -> list[Plan]:
    if file is None:
        return list(
            make_plans(
                source,
                devices.names(),
                request,
                draft=devices.draft,
                per_device=devices.per_device,
                profiles=devices.profiles,
                announce=announce,
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


def _checked(
    plans: list[Plan], output: Path, source: ModelSource
) -> tuple[list[tuple[Plan, Path]], dict[str, EdgekitError]]:
    """Return every plan that can be built with the path of its artifact, and by device the errors of other plans.

    Raises the error where there is nothing to build.
    """
    ready, refused = [], {}
    for plan, place in zip(plans, places_for(plans, output), strict=True):
        try:
            check_export(plan, place, source)
            ready.append((plan, place))
        except EdgekitError as error:
            if len(plans) == 1:
                raise
            refused[plan.device] = error
            click.echo(f"edgekit: {plan.device} cannot be built: {error}", err=True)
    if not ready:
        raise next(iter(refused.values()))
    return ready, refused


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
    lines = [
        f"{artifact.folder}: {plan.model.name} for {plan.device} as {plan.built_as}",
        f"  {len(artifact.manifest.files)} files, {show_bytes(size)}, sha256 {artifact.sha256}",
        f"  self-check: {artifact.manifest.self_check}",
        f"  predicted: {show_bytes(plan.estimate.total_bytes)} of memory for {plan.context:,} tokens,"
        f" {plan.speed.decode_tokens_per_s:g} tok/s",
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
