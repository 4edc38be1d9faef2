"""`edgekit handover`: weights and files for another project's server, planned before a GPU is rented."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import click
from pydantic import Field

from edgekit import QuantizeOptions, open_source
from edgekit.apps.handover.bundle import check_bundle, write_bundle
from edgekit.apps.handover.make import plan_server
from edgekit.apps.handover.request import ServerRequest
from edgekit.apps.handover.resolver import LAYOUT_HEAD, layout_rows
from edgekit.apps.handover.server_plan import RejectedLayout, ServerPlan
from edgekit.commands import CALIBRATION, SomeFields, draw, options, progress_display, reporter
from edgekit.common.base import Frozen
from edgekit.common.options import Option
from edgekit.common.units import show_bytes
from edgekit.errors import DoesNotFit, InvalidInput


class HandoverOutput(Frozen):
    """The folder to write, and the output format."""

    output: Annotated[Path | None, Option(short="o")] = Field(
        default=None, description="The folder to write; it must not exist. Without it, only plan, and read no weights."
    )
    all: bool = Field(default=False, description="List every layout that was not taken, with the reason.")
    json_: Annotated[bool, Option(name="json")] = Field(default=False, description="Print the plan as JSON.")


@click.command()
@click.argument("model")
@options(request=ServerRequest, calibrating=SomeFields(QuantizeOptions, CALIBRATION), shown=HandoverOutput)
def command(model: str, request: ServerRequest, calibrating: QuantizeOptions, shown: HandoverOutput) -> None:
    """Plan how a server holds MODEL on data-centre GPUs, and write its weights and files.

    MODEL is a Hugging Face folder, a .gguf file, a hub id, or neutral weights with a float embedding. The
    GPUs need not be here: memory and speed are predicted. Exit code 3: no layout carries the load; every one is then
    listed with the number that failed and the smallest change that would make it pass.
    """
    given = ("calibrate", "method", "effort", "compute", "store")
    named = " and ".join(f"--{name}" for name in given if getattr(calibrating, name) is not None)
    if named and shown.output is None:
        raise InvalidInput(f"{named}: nothing is quantised without --output; name a folder, or leave it out")
    source = open_source(model, need_weights=shown.output is not None)
    try:
        plan = plan_server(source, request)
    except DoesNotFit as error:
        rejected = [each for tried in error.rejected.values() for each in tried]
        if not shown.json_:
            _draw_layouts(rejected)
            raise DoesNotFit(str(error)) from error
        every = [each.model_dump(mode="json") for each in rejected]
        click.echo(json.dumps({"error": str(error), "rejected": every}, indent=1))
        raise SystemExit(error.exit_code) from error
    texts = check_bundle(plan, source, shown.output) if shown.output is not None else {}
    if shown.json_:
        click.echo(plan.to_json().rstrip())
    else:
        _print_plan(plan, shown.all)
    if shown.output is not None:
        with progress_display() as progress:
            reported = calibrating.model_copy(update={"report": reporter(progress)})
            write_bundle(plan, source, texts, shown.output, request.recipe, reported)
        if not shown.json_:
            click.echo(f"written to {shown.output}; its README.md has the commands")


def _print_plan(plan: ServerPlan, with_rejected: bool) -> None:
    memory, speed, layout = plan.memory, plan.speed, plan.layout
    classes = " + ".join(f"{name} {show_bytes(size)}" for name, size in memory.classes if size)
    per_copy = f", {plan.sequences_each} a copy" if layout.data > 1 else ""
    lines = [
        f"{plan.server}: {plan.model.name} as {plan.recipe.name} on {plan.gpu}x{layout.gpus}, {layout}",
        f"  memory   {show_bytes(memory.total_bytes)} a GPU = {classes}",
        f"  allowed  {show_bytes(plan.budget_bytes)}: {plan.budget_why}",
        f"  cache    {plan.sequences} × {plan.context:,} tokens asked{per_copy}; a copy holds {plan.kv_tokens:,}",
        f"  speed    {speed.tokens_per_s_each:g} tok/s each, {speed.tokens_per_s_all:g} together,"
        f" first token after {speed.first_token_s:g} s",
    ]
    if plan.transfer_bytes is not None:
        lines.append(f"  travels  {show_bytes(plan.transfer_bytes)} of KV from prefill to decode for each request")
    lines += [f"  note     {note}" for note in plan.notes]
    lines.append("  all figures are predictions: none was measured on these GPUs")
    click.echo("\n".join(lines))
    if with_rejected:
        click.echo()
        _draw_layouts(plan.rejected)
    elif plan.rejected:
        failed = sum(1 for each in plan.rejected if each.failures)
        click.echo(
            f"  others   {len(plan.rejected) - failed} fit and {failed} do not; --all lists them with the reason"
        )


def _draw_layouts(layouts: Sequence[RejectedLayout]) -> None:
    draw(LAYOUT_HEAD, [row for each in layouts for row in layout_rows(each)], wraps_at=LAYOUT_HEAD[-1])
