"""`edgekit sweep`: which recipe is worth having on a device."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit.cli._calibrating import calibration_for
from edgekit.cli._progress import progress_display
from edgekit.cli._reports import check_reports, show, show_notes, write_reports
from edgekit.files import write_file


@click.command()
@click.argument("model")
@click.option("--device", default="this", show_default=True, help="The device that is planned for; it is run here.")
@click.option("--recipes", required=True, help="Recipes, with commas between: s4-g32,s4-g64,s4-g128,s8.")
@click.option("--target", help="Only this target: onnx, mlx, executorch or an installed one.")
@click.option(
    "--context",
    type=click.IntRange(16, 1 << 27),
    help="Tokens of context; without it, what the model and the device allow.",
)
@click.option("--workload", "-w", default="grid", show_default=True, help="A bundled workload, or a YAML file.")
@click.option("--calibrate", type=Path, help="Text, jsonl of texts or chats, or .npy tokens; `default`: ours.")
@click.option("--text", type=Path, help="The text to evaluate on, instead of the bundled one.")
@click.option("--tokens", type=click.IntRange(16, 1 << 24), default=4096, show_default=True, help="How much is read.")
@click.option("--ray", "cluster", metavar="ADDRESS", help="Build and evaluate on this Ray cluster; `local` starts one.")
@click.option("--output", "-o", type=Path, required=True, help="The folder for artifacts and reports.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as JSON, and nothing else.")
def command(
    model: str,
    device: str,
    recipes: str,
    target: str | None,
    context: int | None,
    workload: str,
    calibrate: Path | None,
    text: Path | None,
    tokens: int,
    cluster: str | None,
    output: Path,
    as_json: bool,
) -> None:
    """Export, bench and evaluate MODEL in each recipe, and say which ones are dominated.

    Writes report.json, report.html, report.md and pareto.png beside the artifacts. An artifact of an earlier sweep of
    the same plan is used again.
    """
    from edgekit.measure.quality import read_text
    from edgekit.measure.report.charts import pareto_chart
    from edgekit.measure.report.tables import notes_of, points_table
    from edgekit.measure.workload import read_workload
    from edgekit.plan import Plan
    from edgekit.planning import find_recipe, make_plans
    from edgekit.resolve import Wish
    from edgekit.source import open_source
    from edgekit.sweep import sweep

    def make_plan(name: str) -> Plan:
        wish = Wish(recipe=find_recipe(name), target=target, context=context)
        return make_plans(model, [device], wish)[0]

    check_reports(output / "report.json", output / "report.html", output / "report.md")
    asked = read_workload(workload)
    read_text(text)  # what cannot be read is said now, not after the first export
    calibration = calibration_for(calibrate, open_source(model)) if calibrate is not None else None
    with progress_display() as progress:
        report = sweep(
            [name.strip() for name in recipes.split(",") if name.strip()],
            make_plan,
            output,
            asked,
            calibration=calibration,
            text=text,
            tokens=tokens,
            cluster=cluster,
            progress=progress,
        )
    write_reports(report, output / "report.json", output / "report.html", output / "report.md")
    if any(point.kl is not None and point.decode_tokens_per_s is not None for point in report.points):
        write_file(output / "pareto.png", pareto_chart(report.points).png)
    if as_json:
        click.echo(report.model_dump_json())
        return
    show(points_table(report))
    show_notes(notes_of(report))
    click.echo(f"{output / 'report.html'}")
