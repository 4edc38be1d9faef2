"""`edgekit sweep`: compares recipes for one device and finds the dominated ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click
from pydantic import Field

import edgekit
from edgekit import QuantOptions, Reporter
from edgekit.apps.bench.commands.reports import ReportFiles, show, show_notes
from edgekit.commands import announce, calibration_for, json_option, options, progress_display
from edgekit.common.base import Frozen
from edgekit.common.files import write_file
from edgekit.common.options import Option


class SweepOptions(Frozen):
    """The recipes of a sweep, and the options for planning, measuring and evaluating each."""

    device: str = Field(default="this", description="The device that is planned for; artifacts run on this machine.")
    recipes: str = Field(description="Recipes, with commas between: s4-g32,s4-g64,s4-g128,s8.")
    target: str | None = Field(
        default=None, description="Only this target: onnx, mlx, llamacpp, executorch or an installed one."
    )
    context: Annotated[int, Field(ge=16, le=1 << 27)] | None = Field(
        default=None, description="Tokens of context; without it, what the model and the device allow."
    )
    workload: Annotated[str, Option(short="w")] = Field(
        default="quick", description="A bundled workload, or a YAML file."
    )
    calibrate: Path | None = Field(
        default=None, description="Calibration text: a file of text, jsonl or .npy tokens, or `default` for ours."
    )
    text: Path | None = Field(default=None, description="The text to evaluate on, instead of the bundled one.")
    tokens: Annotated[int, Field(ge=16, le=1 << 24)] = Field(default=4096, description="Tokens of the text to read.")
    cluster: Annotated[str | None, Option(name="ray", metavar="ADDRESS")] = Field(
        default=None, description="Build and evaluate on this Ray cluster; `local` starts one on this machine."
    )
    output: Annotated[Path, Option(short="o")] = Field(description="The folder for artifacts and reports.")


@click.command()
@click.argument("model")
@options(choice=SweepOptions)
@json_option("Print the whole report as JSON, and nothing else.")
def command(model: str, choice: SweepOptions, as_json: bool) -> None:
    """Export, bench and evaluate MODEL in each recipe, and say which ones are dominated.

    Writes report.json, report.html and report.md next to the artifacts, and pareto.png if a recipe has both a speed and
    a quality. Artifacts of an earlier sweep with the same plan are reused.
    """
    from edgekit import Plan, find_recipe, open_source
    from edgekit.apps.bench.eval.evaluate import read_text
    from edgekit.apps.bench.machine import Machine
    from edgekit.apps.bench.report.charts import has_pareto, pareto_chart
    from edgekit.apps.bench.report.tables import notes_of, points_table
    from edgekit.apps.bench.run import busy_note
    from edgekit.apps.bench.sweep import sweep
    from edgekit.apps.bench.workload import read_workload

    def make_plan(name: str) -> Plan:
        return edgekit.plan(model, choice.device, recipe=name, target=choice.target, context=choice.context)

    files = ReportFiles(**{key: choice.output / f"report.{end}" for key, end in _ENDINGS.items()})
    files.check()
    workload = read_workload(choice.workload)
    read_text(choice.text)  # a text that cannot be read is refused now, not after the first export
    names = [name.strip() for name in choice.recipes.split(",") if name.strip()]
    calibration = None
    if choice.calibrate is not None:
        text = QuantOptions(calibrate=choice.calibrate, report=Reporter(note=announce, warn=announce))
        calibration = calibration_for(open_source(model), [find_recipe(name) for name in names], text)
    busy = busy_note(Machine())
    if busy is not None:
        click.echo(busy, err=True)
    with progress_display() as progress:
        report = sweep(
            names,
            make_plan,
            choice.output,
            workload,
            calibration=calibration,
            text=choice.text,
            tokens=choice.tokens,
            cluster=choice.cluster,
            progress=progress,
        )
    files.write(report)
    if has_pareto(report.points):
        write_file(choice.output / "pareto.png", pareto_chart(report.points).png)
    if as_json:
        click.echo(report.model_dump_json())
        return
    show(points_table(report))
    show_notes(notes_of(report))
    click.echo(f"{choice.output / 'report.html'}")


_ENDINGS = {"output": "json", "html": "html", "markdown": "md"}
