"""`edgekit lab`: the same measurement on every device, and nothing lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgekit.cli._progress import progress_display
from edgekit.errors import EdgekitError, InvalidInput
from edgekit.files import home, write_output
from edgekit.units import show_bytes

if TYPE_CHECKING:
    from edgekit.lab.devices import LabDevice
    from edgekit.lab.matrix import Lab
    from edgekit.lab.store import Store

Command = TypeVar("Command", bound=Callable[..., Any])
_FILE = click.Path(path_type=Path, dir_okay=False)
_lab_file = click.argument("file", type=_FILE)
_json = click.option("--json", "as_json", is_flag=True, help="JSON lines instead of text.")
_ray = click.option(
    "--ray", "cluster", metavar="ADDRESS", help="Export models on this Ray cluster; `local` starts one."
)
_store = click.option("--store", type=_FILE, help="Where runs are kept, instead of lab.sqlite in edgekit's folder.")


@click.group(name="lab")
def command() -> None:
    """Measure artifacts on many devices, compare with a baseline, and lose nothing."""


@command.command()
@_lab_file
@click.option("--timeout", type=float, default=30.0, show_default=True, help="Seconds for each device to answer.")
@_json
def check(file: Path, timeout: float, as_json: bool) -> int:
    """Read FILE and ask every device whether it is there. Exits with 4 where one is not."""
    from edgekit.lab.matrix import read_lab

    lab, missing = read_lab(file), 0
    for name, device in _connected(lab).items():
        try:
            answer, is_there = device.ping(timeout_s=timeout), True
        except EdgekitError as error:
            answer, is_there = str(error), False
            missing += 1
        if as_json:
            click.echo(json.dumps({"device": name, "is_there": is_there, "answer": answer}))
        else:
            click.echo(f"{name:<20} {'here' if is_there else 'gone'}  {answer}")
    return 4 if missing else 0


@command.command()
@_lab_file
@_ray
@_json
def plan(file: Path, cluster: str | None, as_json: bool) -> None:
    """Show the cells that FILE means, with predicted memory and time. Models are exported where they are not yet."""
    from edgekit.lab.matrix import cells_of, read_lab

    lab = read_lab(file)
    total: dict[str, tuple[float, float]] = {}
    for cell in cells_of(lab, _artifacts(lab, cluster)):
        works_s, most_s = total.get(cell.device, (0.0, 0.0))
        total[cell.device] = works_s + (cell.predicted_s or 0.0), most_s + cell.timeout_s
        if as_json:
            click.echo(cell.model_dump_json())
        else:
            memory = show_bytes(cell.predicted_bytes) if cell.predicted_bytes else "not known"
            click.echo(
                f"{cell.id}  {cell.device:<16} {cell.workload:<12} #{cell.repeat}  memory {memory}, "
                f"decode {cell.predicted_decode_tokens_per_s or 0:.0f} tok/s, {cell.predicted_s or 0:.0f} s, "
                f"at most {cell.timeout_s:.0f} s  "
                f"{cell.artifact}"
            )
    if not as_json:
        for name, (works_s, most_s) in total.items():
            click.echo(f"{name}: {works_s / 60:.0f} min predicted, openings come on top; at most {most_s / 60:.0f} min")


@command.command()
@_lab_file
@click.option("--resume", "resumed", help="Go on with this run; `last` is the newest of the lab.")
@click.option("--baseline", help="The run to compare with, instead of the one that was set.")
@click.option("--html", type=_FILE, help="Write the report here as one HTML page.")
@click.option("--markdown", type=_FILE, help="Write it here as Markdown.")
@click.option("--junit", "junit_file", type=_FILE, help="Write it here as JUnit XML.")
@_ray
@_store
@_json
def run(
    file: Path,
    resumed: str | None,
    baseline: str | None,
    html: Path | None,
    markdown: Path | None,
    junit_file: Path | None,
    cluster: str | None,
    store: Path | None,
    as_json: bool,
) -> int:
    """Measure every cell of FILE; each result is kept as it comes, and ctrl-C leaves a run that can go on.

    Exits with 5 where a threshold was passed against the baseline, with 4 where something is missing or was disturbed.
    """
    from time import time

    from edgekit.lab.matrix import cells_of, read_lab
    from edgekit.lab.run import new_run, run_lab
    from edgekit.lab.watching import watching

    with _opened(store) as kept:
        lab = read_lab(file)
        if resumed is None:
            name = new_run()
            kept.begin(name, lab, cells_of(lab, _artifacts(lab, cluster)), time())
        else:
            if cluster is not None:
                raise InvalidInput("--ray: a resumed run has its artifacts already; leave it out")
            name = _newest(kept, lab.name) if resumed == "last" else resumed
            lab = kept.lab(name)
        click.echo(f"run {name}", err=True)
        try:
            with watching(lab, kept, name) as watch:
                run_lab(lab, kept, name, _connected(lab), watch=watch)
        except KeyboardInterrupt:
            click.echo(f"stopped; go on with `edgekit lab run {file} --resume {name}`", err=True)
            return 130
        return _reported(kept, name, baseline, html, markdown, junit_file, as_json)


@command.command()
@click.argument("name", metavar="[RUN]", required=False)
@click.option("--html", type=_FILE, help="Write the run's report here as one HTML page.")
@click.option("--markdown", type=_FILE, help="Write it here as Markdown.")
@click.option("--junit", "junit_file", type=_FILE, help="Write it here as JUnit XML.")
@_store
@_json
def history(
    name: str | None,
    html: Path | None,
    markdown: Path | None,
    junit_file: Path | None,
    store: Path | None,
    as_json: bool,
) -> int:
    """Every run, newest first; or one RUN, reported again."""
    from edgekit.lab.store import json_of

    with _opened(store) as kept:
        if name is not None:
            return _reported(kept, name, None, html, markdown, junit_file, as_json)
        for info in kept.history():
            if as_json:
                click.echo(json_of(info))
                continue
            begun = datetime.fromtimestamp(info.begun_at, UTC).strftime("%Y-%m-%d %H:%M")
            states = ", ".join(f"{count} {state}" for state, count in sorted(info.states.items()))
            click.echo(f"{info.id}  {info.lab:<20} {begun}  {states}{'' if info.ended_at else '  (not complete)'}")
    return 0


@command.command()
@click.argument("before")
@click.argument("after")
@_store
@_json
def compare(before: str, after: str, store: Path | None, as_json: bool) -> int:
    """What changed from run BEFORE to run AFTER, said only where the spread allows it. Exits with 5 where worse."""
    from edgekit.lab.report import exit_code, rows_of, same_lab

    with _opened(store) as kept:
        same_lab(kept, (before, after))
        rows = list(rows_of(kept, after, before))
        for row in rows:
            for one in row.differences:
                if as_json:
                    click.echo(json.dumps({"device": row.cell.device, "cell": row.cell.id, **one.model_dump()}))
                else:
                    change = "" if one.change is None else f"{one.change:+.1%}"
                    artifact = row.cell.artifact.rsplit("/", 1)[-1]
                    where = f"{row.cell.device:<16} {artifact} #{row.cell.repeat}, {one.workload}, {one.case}"
                    click.echo(f"{where}: {one.metric} {one.verdict} {change} {one.why}")
    return 5 if exit_code(rows) == 5 else 0


@command.group()
def baseline() -> None:
    """The run that later ones are compared with."""


@baseline.command("set")
@click.argument("name", metavar="RUN")
@_store
def baseline_set(name: str, store: Path | None) -> None:
    """Compare later runs of the same lab with RUN."""
    with _opened(store) as kept:
        lab = kept.info(name).lab
        kept.set_baseline(lab, name)
        click.echo(f"{lab}: later runs are compared with {name}")


@command.command()
@click.argument("name", metavar="RUN")
@_store
def calibrate(name: str, store: Path | None) -> None:
    """Write what RUN measured into profiles of your own, so that the next plan predicts by it."""
    from edgekit.lab.calibrate import calibrate as written

    with _opened(store) as kept:
        folders = [Path(folder) for folder in kept.lab(name).profiles]
        for one in written(kept, name, folders):
            click.echo(f"{one.profile}: {one.what} {one.before} → {one.now}, in {one.path}")


@command.command()
@click.argument("artifact", type=click.Path(path_type=Path, file_okay=False))
@click.option("--workload", "-w", default="quick", show_default=True, help="A bundled workload or a YAML file.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Trials of each case, instead of the workload's.")
@click.option("--loads", type=click.IntRange(1, 100), default=3, show_default=True, help="Fresh processes that open.")
@click.option("--exact", is_flag=True, help="One token a call, so that chunking changes nothing.")
@click.option("--output", "-o", type=_FILE, help="Write it here instead of on stdout.")
def question(artifact: Path, workload: str, repeats: int | None, loads: int, exact: bool, output: Path | None) -> None:
    """Write what a native runner of ARTIFACT is asked, for one that is started by hand."""
    from edgekit.lab.question import question_of
    from edgekit.measure.workload import read_workload

    asked = read_workload(workload)
    if repeats is not None:
        asked = asked.model_copy(update={"repeats": repeats})
    text = question_of(artifact, asked, loads=loads, exact=exact).model_dump_json()
    if output is None:
        click.echo(text)
    else:
        write_output(output, text.encode())


def _opened(store: Path | None) -> Store:
    from edgekit.lab.store import Store

    return Store(store or home() / "lab.sqlite")


def _connected(lab: Lab) -> dict[str, LabDevice]:
    from edgekit.lab.devices import connect

    return {device.name: connect(device, [Path(folder) for folder in lab.profiles]) for device in lab.devices}


def _artifacts(lab: Lab, cluster: str | None) -> dict[str, list[Path]]:
    """The folders that each device measures; models are exported once for each plan that differs."""
    from edgekit.lab.exports import exported

    with progress_display() as progress:
        made = exported(lab, home() / "lab", progress, cluster)
    return {name: [*map(Path, lab.artifacts), *paths] for name, paths in made.items()}


def _newest(store: Store, lab: str) -> str:
    known = store.history(lab)
    if not known:
        raise InvalidInput(f"--resume last: lab {lab} has no run yet; leave it out")
    return known[0].id


def _reported(
    store: Store,
    name: str,
    baseline: str | None,
    html: Path | None,
    markdown: Path | None,
    junit_file: Path | None,
    as_json: bool,
) -> int:
    from edgekit.lab.report import baseline_of, exit_code, junit, report_of, rows_of
    from edgekit.measure.report.markdown import markdown as as_markdown

    against = baseline_of(store.lab(name), store, name, baseline)
    rows = list(rows_of(store, name, against))
    report = report_of(store, name, rows, against)
    if html is not None:
        from edgekit.measure.report.page import page

        write_output(html, page(report).encode())
    if markdown is not None:
        write_output(markdown, as_markdown(report).encode())
    if junit_file is not None:
        write_output(junit_file, junit(store, name, rows))
    if as_json:
        for row in rows:
            measured = store.result(name, row.cell.id)
            found = measured.model_dump(mode="json") if measured else None
            click.echo(json.dumps({"cell": row.cell.model_dump(), "state": row.state, "verdict": row.verdict,
                                   "why": row.why, "measurement": found}))  # fmt: skip
    else:
        click.echo(as_markdown(report))
    return exit_code(rows)
