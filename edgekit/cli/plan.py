"""`edgekit plan`: what to build for which device, and why, before a byte is downloaded or converted."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from edgekit.cli._console import console as new_console
from edgekit.cli._console import draw
from edgekit.cli._options import make_wish, wish_options
from edgekit.device import DeviceProfile
from edgekit.errors import DoesNotFit, EdgekitError, InvalidInput
from edgekit.files import check_output, write_output
from edgekit.memory import explain
from edgekit.plan import Plan
from edgekit.planning import make_plans
from edgekit.profiles import load_profile
from edgekit.reading import read_bytes
from edgekit.resolve import Wish
from edgekit.resolve.table import rows_of
from edgekit.units import show_bytes

_MAX_LIST_BYTES = 1 << 20


@click.command()
@click.argument("model", required=False)
@click.option(
    "--device", "devices", multiple=True, help="A device profile; may be given several times.  [default: this]"
)
@wish_options
@click.option("--which-models", type=Path, help="Instead of MODEL: a file of folders or ids, one a line.")
@click.option("--explain", "show_arithmetic", is_flag=True, help="Print the formulas with their numbers.")
@click.option("--output", "-o", type=Path, help="Write the plan there, for --plan of later commands.")
@click.option("--json", "as_json", is_flag=True, help="Print plans as JSON.")
def command(
    model: str | None,
    devices: tuple[str, ...],
    which_models: Path | None,
    show_arithmetic: bool,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Decide what to build of MODEL for each device, and say why.

    MODEL is a Hugging Face folder, a hub id, or `demo`. Every option that was not taken is listed with the number that
    failed and the smallest change that would make it pass. Exit code 3: nothing fits.
    """
    wish = make_wish(options)
    devices = devices or ("this",)
    if which_models is not None:
        if model is not None or output is not None:
            raise InvalidInput("--which-models takes no MODEL and no --output; leave one of them away")
        _print_models(_lines(which_models), devices, wish, options["profiles"], as_json)
        return
    if model is None:
        raise InvalidInput("a MODEL is missing: a Hugging Face folder, a hub id, or demo")
    if output is not None and len(devices) > 1:
        raise InvalidInput(
            f"--output {output} holds one plan, and {len(devices)} devices were given; run it once a device"
        )
    check_output(output)
    try:
        plans = make_plans(
            model, devices, wish, draft=options["draft"], per_device=options["per_device"], profiles=options["profiles"]
        )
    except DoesNotFit as error:
        if not as_json:
            raise
        rejected = {name: [each.model_dump(mode="json") for each in tried] for name, tried in error.rejected.items()}
        click.echo(json.dumps({"error": str(error), "rejected": rejected}, indent=1))
        raise SystemExit(error.exit_code) from error
    if output is not None:
        write_output(output, plans[0].to_json().encode())
    if as_json:
        click.echo("[\n" + ",\n".join(plan.to_json().rstrip() for plan in plans) + "\n]")
        return
    console = new_console(soft_wrap=True)
    for plan in plans:
        _print_plan(console, plan, show_arithmetic)
    if output is not None:
        click.echo(f"written to {output}; next: edgekit export {quote(model)} --plan {quote(str(output))} -o OUT")


def _print_plan(console: Console, plan: Plan, show_arithmetic: bool) -> None:
    estimate, speed, quality = plan.estimate, plan.speed, plan.quality
    kept = f"context {plan.context:,}"
    if plan.cache.window is not None:
        kept = f"window {plan.cache.window:,} with {plan.cache.sinks} sinks"
    sequences = f" × {plan.sequences} sequences" if plan.sequences > 1 else ""
    made = f"{plan.target} {plan.backend} {plan.recipe.name}"
    rest = f", {kept}{sequences}, {plan.storage.kv_bits}-bit cache"
    console.print(Text.assemble((plan.device, "bold"), f": {plan.model.name} as ", (made, "bold"), rest))
    classes = " + ".join(
        f"{name} {show_bytes(size)}"
        for name, size in (
            ("mapped weights", estimate.mapped_weights_bytes),
            ("private weights", estimate.private_weights_bytes),
            ("cache", estimate.kv_bytes),
            ("activations", estimate.activation_bytes),
            ("runtime", estimate.runtime_bytes),
            ("draft", estimate.draft_bytes),
            ("prefixes", estimate.prefix_bytes),
            ("adapters", estimate.adapter_bytes),
        )
        if size
    )
    console.print(f"  memory   {show_bytes(estimate.total_bytes)} = {classes}")
    console.print(f"  allowed  {show_bytes(plan.budget_bytes)}: {plan.budget_why}")
    measured = "measured" if quality.basis == "measured" else "a prior: not measured for this model"
    first = "" if speed.first_token_s is None else f", first token after {speed.first_token_s:g} s"
    prefill = "" if speed.prefill_tokens_per_s is None else f", prefill {speed.prefill_tokens_per_s:g} tok/s"
    console.print(f"  speed    decode {speed.decode_tokens_per_s:g} tok/s{prefill}{first} (predicted)")
    console.print(f"  quality  {quality.same_top:.3f} of top tokens kept, KL {quality.kl:g} ({measured})")
    if show_arithmetic:
        console.print(f"    quality: {quality.basis}: {quality.source}")
    for step in plan.ladder:
        console.print(f"  given up {step.change}: saves {show_bytes(step.saved_bytes)}")
    for note in plan.notes:
        console.print(f"  note     {note}")
    if show_arithmetic:
        for line in explain(plan):
            console.print(f"    {line}")
        console.print(f"    speed: {speed.basis}")
    if plan.rejected:
        console.print()
        _draw_rejected(plan)


def _draw_rejected(plan: Plan) -> None:
    rows = [
        (f"{target} {backend}".strip(), recipe, memory, speed, quality, why)
        for option in plan.rejected
        for target, backend, recipe, memory, _, speed, quality, why in rows_of(option)
    ]
    head = ("not taken", "recipe", "memory", "tok/s", "quality", "why not → the smallest change that helps")
    draw(head, rows, wraps_at=head[-1])


def _lines(path: Path) -> list[str]:
    text = read_bytes(path, _MAX_LIST_BYTES).decode(errors="replace")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    found = [line for line in lines if line]
    if not found:
        raise InvalidInput(f"{path}: names no model; write one folder or hub id a line")
    return found


def _print_models(
    models: list[str], devices: tuple[str, ...], wish: Wish, folders: tuple[Path, ...], as_json: bool
) -> None:
    """What each device can run of a list, devices ordered by memory."""
    memory = {name: _memory(load_profile(name, folders)) for name in devices}
    by_memory = sorted(devices, key=lambda name: memory[name])
    rows = [_model_row(model, name, memory[name], folders, wish) for name in by_memory for model in models]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    keys = ("device", "memory", "model", "as", "context", "needs", "speed", "quality")
    drawn = []
    for row in rows:
        shown = row | {"memory": show_bytes(row["memory_bytes"]), "model": Path(row["model"]).name or row["model"]}
        drawn.append([str(shown.get(key, "")) for key in keys])
    head = ("device", "memory", "model", "runs as", "context", "needs", "tok/s", "quality")
    draw(head, drawn, wraps_at="runs as")


def _memory(profile: DeviceProfile) -> int:
    return (profile.vram or profile.ram).value


def _model_row(model: str, device: str, memory: int, folders: tuple[Path, ...], wish: Wish) -> dict[str, Any]:
    row = {"device": device, "memory_bytes": memory, "model": model}
    try:
        plan = make_plans(model, [device], wish, profiles=folders)[0]
    except EdgekitError as error:
        return {**row, "fits": False, "as": f"no: {error}"}
    return {
        **row,
        "fits": True,
        "as": f"{plan.target} {plan.backend} {plan.recipe.name}",
        "context": f"window {plan.cache.window}" if plan.cache.window else plan.context,
        "needs": show_bytes(plan.estimate.total_bytes),
        "speed": plan.speed.decode_tokens_per_s,
        "quality": plan.quality.same_top,
    }
