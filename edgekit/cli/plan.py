"""`edgekit plan`: decides how to build a model for each device and why, before weights are downloaded or converted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import click
from pydantic import Field
from rich.console import Console
from rich.text import Text

import edgekit
from edgekit.artifact.export_memory import with_peak
from edgekit.cli._console import WIDE_TABLE, console as new_console, draw, print_below
from edgekit.cli._options import PlanDevices, SectionedCommand, as_typed, options
from edgekit.cli._progress import announce
from edgekit.cli._rejected import counted, draw_rejected, plans_that_fit, show_what_does_not_fit, together
from edgekit.common.base import Frozen
from edgekit.common.files import check_output, write_output
from edgekit.common.options import Option
from edgekit.common.units import show_bytes
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import needs_text
from edgekit.errors import DoesNotFit, EdgekitError, InvalidInput
from edgekit.planner import gpu_layers
from edgekit.planner.make import targets_for
from edgekit.planner.memory import explain
from edgekit.planner.request import PlanRequest
from edgekit.plugins import load_target

_SHORT = 60  # characters of a reason that is shown without --explain


class PlanOutput(Frozen):
    """The shown parts of a plan, and its output file."""

    all: bool = Field(default=False, description="List every option that was not taken, with the reason.")
    explain: bool = Field(default=False, description="Print sources, and the formulas with their numbers.")
    output: Annotated[Path | None, Option(short="o")] = Field(
        default=None, description="Write the plan there, for `edgekit export --plan`."
    )
    json_: Annotated[bool, Option(name="json")] = Field(default=False, description="Print plans as JSON.")


_EXAMPLES = """\b
Examples:
  edgekit plan demo --device raspberry-pi-5-8gb
  edgekit plan ./model --device iphone-16 --device pixel-9 --context 4096 --explain
"""


@click.command(cls=SectionedCommand, epilog=_EXAMPLES)
@click.argument("model")
@options(devices=PlanDevices, request=PlanRequest, shown=PlanOutput)
def command(model: str, devices: PlanDevices, request: PlanRequest, shown: PlanOutput) -> None:
    """Decide how to build MODEL for each device, and say why.

    MODEL is a Hugging Face folder, a .gguf file, a hub id, or `demo`. Exit code 3: nothing fits; the nearest options
    are then listed (--all: every one) with the number that failed and the smallest change that would make it pass.
    """
    if shown.output is not None and len(devices.names()) > 1:
        count = len(devices.names())
        raise InvalidInput(
            f"--output {shown.output} holds one plan, and {count} devices were given; run it once per device"
        )
    check_output(shown.output)
    given: dict[str, Any] = {"draft": devices.draft, "profiles": devices.profiles, **dict(request)}
    plans, refused = plans_that_fit(
        lambda names: edgekit.plan(model, names, announce=announce, **given), devices.names()
    )
    plans = [with_peak(plan, load_target(plan.target)) for plan in plans]
    refusal = together(refused) if refused else None
    if refusal is not None and (shown.json_ or not plans):
        if not shown.json_:
            raise _shown(refusal, shown)
        tried = refusal.rejected if isinstance(refusal, DoesNotFit) else {}
        rejected = {name: [each.model_dump(mode="json") for each in options] for name, options in tried.items()}
        click.echo(json.dumps({"error": str(refusal), "rejected": rejected}, indent=1))
        raise SystemExit(refusal.exit_code)
    if shown.output is not None:
        write_output(shown.output, plans[0].to_json().encode())
    if shown.json_:
        click.echo("[\n" + ",\n".join(plan.to_json().rstrip() for plan in plans) + "\n]")
        return
    console = new_console(soft_wrap=True)
    if len(devices.names()) > 1:
        _draw_summary(plans, refused)
    if len(devices.names()) == 1 or shown.all or shown.explain:
        for plan in plans:
            _print_plan(console, plan, shown)
    if refusal is not None:
        raise _shown(refusal, shown)
    if shown.output is not None:
        following = f"export {quote(model)} --plan {quote(str(shown.output))} -o OUT"
    else:
        words = [*as_typed("devices", "request"), "-o", quote(f"{plans[0].model.name}.edgekit")]
        following = f"export {quote(model)} {' '.join(words)}"
    written = "" if shown.output is None else f"written to {shown.output}; "
    click.echo(f"{written}next: edgekit {following}")
    made = (plan.quantisation is not None or not needs_text(plan.recipe, plan.model) for plan in plans)
    if not all(made) and find_spec("torch") is None:
        announce("making this here needs torch: pip install 'edgekit[quantize]'; without it, export rounds to 8 bits")


def _shown(refusal: EdgekitError, shown: PlanOutput) -> EdgekitError:
    """Return the error without its options, after printing all of them, if `--all` asks for it."""
    if not shown.all or not isinstance(refusal, DoesNotFit):
        return refusal
    show_what_does_not_fit(refusal, every=True)
    return DoesNotFit(str(refusal))


def _kept(plan: Plan) -> str:
    """Format the context, window and sequences of a plan."""
    kept = f"context {plan.context:,}"
    if plan.cache.window is not None:
        kept = f"window {plan.cache.window:,}{plan.cache.how} with {plan.cache.sinks} sinks"
    return kept + (f" × {plan.sequences} sequences" if plan.sequences > 1 else "")


def _draw_summary(plans: list[Plan], refused: Iterable[str]) -> None:
    """Print one row per device: the verdict, the choice and three figures; a wide terminal shows more columns."""
    rows = [
        (
            plan.device,
            "fits",
            plan.built_as,
            show_bytes(plan.estimate.private_bytes),
            plan.speed.decode.show(),
            plan.quality.show(),
            show_bytes(plan.budget_bytes),
            _kept(plan),
        )
        for plan in plans
    ]
    rows += [(device, "NO", "", "", "", "", "", "") for device in refused]
    head = ("device", "fits", "build", "private", "tok/s", "quality", "allowed", "kept")
    columns = len(head) if new_console().width >= WIDE_TABLE else len(head) - 2
    draw(head[:columns], [row[:columns] for row in rows])
    click.echo("tok/s: a range; quality: how often the likeliest token stays; ~ marks a prior")


def _print_plan(console: Console, plan: Plan, shown: PlanOutput) -> None:
    estimate, speed, quality = plan.estimate, plan.speed, plan.quality
    made = plan.built_as
    rest = f", {_kept(plan)}" + ("" if plan.model.encoder else f", {plan.storage.kv_bits}-bit cache")
    console.print(
        Text.assemble(
            (plan.device, "bold"), ": ", ("fits", "bold green"), f", {plan.model.name} as ", (made, "bold"), rest
        )
    )
    classes = [f"{name} {show_bytes(size)}" for name, size in estimate.classes if size]
    mapped = f"; {classes.pop(0)}" if estimate.mapped_weights_bytes else ""
    _print_line("memory", f"{show_bytes(estimate.private_bytes)} private = {' + '.join(classes)}{mapped}")
    making = f"; making them takes about {show_bytes(plan.export_bytes)} of memory" if plan.export_bytes else ""
    packed = f"; opening packs {show_bytes(estimate.cached_disk_bytes)} more" if estimate.cached_disk_bytes else ""
    _print_line("files", f"{show_bytes(estimate.file_bytes)}{making}{packed}")
    if (on_gpu := gpu_layers.describe(plan)) is not None:
        holds = "" if estimate.gpu_bytes is None else f", {show_bytes(estimate.gpu_bytes)} of its own memory"
        _print_line("GPU layers", f"{on_gpu}{holds}")
    is_short = len(plan.budget_why) <= _SHORT
    why = f": {plan.budget_why}" if shown.explain or is_short else " (--explain says why)"
    _print_line("allowed", f"{show_bytes(plan.budget_bytes)}{why}")
    first = "" if speed.first_token_s is None else f", first token after {speed.first_token_s:g} s"
    prefill = "" if speed.prefill_tokens_per_s is None else f", prefill {speed.prefill_tokens_per_s:g}"
    if plan.model.encoder:  # it decodes nothing, and there are no top tokens to keep
        if prefill:
            _print_line("speed", f"reads {speed.prefill_tokens_per_s:g} tok/s (predicted)")
    else:
        _print_line("speed", f"decode {speed.decode.show(' to ')} tok/s{prefill}{first}")
        if speed.origin is not None:
            _print_line("source", speed.origin)
        low = "" if quality.kl_low is None else f"{quality.kl_low:.2g} to "
        kept = "" if quality.same_top is None else f" of top tokens kept, KL {low}{quality.loss:.2g}"
        _print_line("quality", f"{quality.show().removeprefix('~')}{kept}")
        _print_line("source", quality.origin or ("measured" if quality.basis == "measured" else quality.source))
    if shown.explain:
        console.print(f"    quality: {quality.basis}: {quality.source}")
    for step in plan.ladder:
        _print_line("given up", f"{step.change}: saves {show_bytes(step.saved_bytes)}")
    for note in plan.all_notes:
        _print_line("note", note)
    if shown.explain:
        for line in explain(plan, load_target(plan.target).memory):
            console.print(f"    {line}")
        console.print(f"    speed: {speed.basis}")
    if shown.all and plan.rejected:
        console.print()
        draw_rejected(plan.rejected)
    elif plan.rejected:
        _print_line("others", counted(plan.rejected))
    absent = [name for name, target in targets_for(None).items() if plan.device == "this" and target.missing()]
    if absent:
        _print_line("absent", f"{', '.join(absent)}: not installed here (edgekit doctor says how)")


def _print_line(name: str, text: str) -> None:
    """Print one labelled line, wrapped under its text on a terminal."""
    print_below(f"{name:<8} {text}", 11)
