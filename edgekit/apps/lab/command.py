"""`edgekit lab`: the same measurements on many devices, with every result kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import click
from pydantic import Field

from edgekit.apps.bench import ReportFiles
from edgekit.commands import json_option, options, progress_display
from edgekit.common.base import Frozen
from edgekit.common.bounds import Loads, Repeats
from edgekit.common.files import home, write_output
from edgekit.common.options import Option
from edgekit.common.units import show_bytes
from edgekit.errors import EdgekitError, InvalidInput

if TYPE_CHECKING:
    from edgekit.apps.lab.devices import LabDevice
    from edgekit.apps.lab.matrix import Lab
    from edgekit.apps.lab.run import EntryEvent
    from edgekit.apps.lab.store import LabStore

Command = TypeVar("Command", bound=Callable[..., Any])
_FILE = click.Path(path_type=Path, dir_okay=False)
_lab_file = click.argument("file", type=_FILE)
_json = json_option("JSON lines instead of text.")
_ANSWER_S = 30.0  # for a device to answer; a phone that wakes up takes some


class LabRunOptions(Frozen):
    resume: str | None = Field(default=None, description="Continue this run; `last` is the newest of the lab.")


class RunsFile(Frozen):
    store: Path | None = Field(
        default=None, description="File of the runs, instead of lab.sqlite in edgekit's cache folder."
    )


_store = options(kept_in=RunsFile)


class LabReportFiles(ReportFiles):
    """The output files of a run's report."""

    output: Annotated[tuple[Path, ...], Option(short="o", metavar="FILE")] = Field(
        default=(),
        description="Write the report there, in the form of the suffix: .json, .html, .md, or .xml for JUnit.",
    )
    forms: ClassVar[tuple[str, ...]] = (*ReportFiles.forms, ".xml")


class JobOptions(Frozen):
    """The options of a job for a native runner."""

    workload: Annotated[str, Option(short="w")] = Field(
        default="quick", description="A bundled workload or a YAML file."
    )
    repeats: Repeats | None = Field(default=None, description="Trials of each case, instead of the workload's.")
    loads: Loads = Field(default=3, description="Fresh processes that open.")
    exact: bool = Field(default=False, description="One token a call, so that chunking changes nothing.")
    output: Annotated[Path | None, Option(short="o")] = Field(
        default=None, description="Write it here instead of on stdout."
    )


@click.group(name="lab")
def command() -> None:
    """Measure artifacts on many devices, and compare with a baseline. Every result is kept."""


@command.command()
@_lab_file
@_json
def check(file: Path, as_json: bool) -> int:
    """Read FILE and check that every device answers. Exits with 4 if one does not."""
    from edgekit.apps.lab.matrix import read_lab

    lab, missing = read_lab(file), 0
    for name, device in _connected(lab).items():
        try:
            answer, is_there = device.ping(timeout_s=_ANSWER_S), True
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
@_json
def plan(file: Path, as_json: bool) -> None:
    """Show the cells of FILE with predicted memory and time. Exports the models that have no artifact yet."""
    from edgekit.apps.lab.matrix import entries_of, read_lab

    lab = read_lab(file)
    total: dict[str, tuple[float, float]] = {}
    for entry in entries_of(lab, _artifacts(lab)):
        works_s, most_s = total.get(entry.device, (0.0, 0.0))
        total[entry.device] = works_s + (entry.predicted_s or 0.0), most_s + entry.timeout_s
        if as_json:
            click.echo(entry.model_dump_json())
        else:
            memory = show_bytes(entry.predicted_bytes) if entry.predicted_bytes else "not known"
            click.echo(
                f"{entry.id}  {entry.device:<16} {entry.workload:<12} #{entry.repeat}  memory {memory}, "
                f"decode {entry.predicted_decode_tokens_per_s or 0:.0f} tok/s, {entry.predicted_s or 0:.0f} s, "
                f"at most {entry.timeout_s:.0f} s  "
                f"{entry.artifact}"
            )
    if not as_json:
        for name, (works_s, most_s) in total.items():
            click.echo(f"{name}: {works_s / 60:.0f} min predicted, openings come on top; at most {most_s / 60:.0f} min")


@command.command()
@_lab_file
@options(choice=LabRunOptions, files=LabReportFiles)
@_store
@_json
def run(file: Path, choice: LabRunOptions, files: LabReportFiles, kept_in: RunsFile, as_json: bool) -> int:
    """Measure every cell of FILE. Each result is stored immediately, and ctrl-C leaves a run that can be resumed.

    Exits with 5 if a threshold against the baseline is exceeded, with 4 if a result is missing or disturbed.
    """
    from time import time

    from edgekit.apps.lab.matrix import entries_of, read_lab
    from edgekit.apps.lab.run import new_run, run_lab

    files.check()
    with _opened(kept_in.store) as kept:
        lab = read_lab(file)
        if lab.baseline is not None:
            kept.info(lab.baseline)  # an unknown one is refused before hours of work
        if choice.resume is None:
            name = new_run()
            kept.begin(name, lab, entries_of(lab, _artifacts(lab)), time())
        else:
            name = _newest(kept, lab.name) if choice.resume == "last" else choice.resume
            lab = kept.lab(name)
        click.echo(f"run {name}", err=True)
        try:
            run_lab(lab, kept, name, _connected(lab), watch=tell)
        except KeyboardInterrupt:
            click.echo(f"stopped; continue with `edgekit lab run {file} --resume {name}`", err=True)
            return 130
        return _reported(kept, name, files, as_json)


@command.command()
@click.argument("name", metavar="[RUN]", required=False)
@options(files=LabReportFiles)
@_store
@_json
def history(name: str | None, files: LabReportFiles, kept_in: RunsFile, as_json: bool) -> int:
    """List the runs, newest first, or report one RUN again."""
    files.check()
    if files.output and name is None:
        raise InvalidInput("--output: writes the report of one RUN; name it")
    with _opened(kept_in.store) as kept:
        if name is not None:
            return _reported(kept, name, files, as_json)
        for info in kept.history():
            if as_json:
                click.echo(json.dumps(info._asdict()))
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
def compare(before: str, after: str, kept_in: RunsFile, as_json: bool) -> int:
    """Compare run BEFORE with run AFTER, as far as the spread allows. Exits with 5 if something became worse."""
    from edgekit.apps.lab.report import exit_code, rows_of

    with _opened(kept_in.store) as kept:
        lab, other = kept.info(before).lab, kept.info(after).lab
        if lab != other:
            raise InvalidInput(f"{before} is of lab {lab} and {after} of lab {other}; compare runs of one lab")
        rows = list(rows_of(kept, after, before))
        for row in rows:
            for one in row.differences:
                if as_json:
                    click.echo(json.dumps({"device": row.entry.device, "cell": row.entry.id, **one.model_dump()}))
                else:
                    change = "" if one.change is None else f"{one.change:+.1%}"
                    artifact = row.entry.artifact.rsplit("/", 1)[-1]
                    where = f"{row.entry.device:<16} {artifact} #{row.entry.repeat}, {one.workload}, {one.case}"
                    click.echo(f"{where}: {one.metric} {one.verdict} {change} {one.why}")
    return 5 if exit_code(rows) == 5 else 0


@command.command("share")
@click.argument("name", metavar="RUN")
@_lab_file
@_store
def share_run(name: str, file: Path, kept_in: RunsFile) -> None:
    """Write what RUN measured to FILE, to give away: `edgekit devices calibrate` reads it."""
    from edgekit.apps.bench import share

    with _opened(kept_in.store) as kept:
        profiles = {device.name: device.profile for device in kept.lab(name).devices}
        results = ((entry, kept.result(name, entry.id)) for entry, _ in kept.entries(name))
        measured = (
            (result, plan, profiles[entry.device])
            for entry, result in results
            if result is not None and (plan := kept.plan(entry.artifact_sha256)) is not None
        )
        click.echo(f"{file}: {share(measured, file)} measurements")


@command.command()
@click.argument("artifact", type=click.Path(path_type=Path, file_okay=False))
@options(job=JobOptions)
def question(artifact: Path, job: JobOptions) -> None:
    """Write the job for a native runner of ARTIFACT that is started by hand."""
    from edgekit.apps.bench import read_workload
    from edgekit.apps.lab.runner_job import job_of

    asked = read_workload(job.workload).repeated(job.repeats)
    text = job_of(artifact, asked, loads=job.loads, exact=job.exact).model_dump_json()
    if job.output is None:
        click.echo(text)
    else:
        write_output(job.output, text.encode())


def _opened(store: Path | None) -> LabStore:
    from edgekit.apps.lab.store import LabStore

    return LabStore(store or home() / "lab.sqlite")


def _connected(lab: Lab) -> dict[str, LabDevice]:
    from edgekit.apps.lab.devices import connect

    return {device.name: connect(device, [Path(folder) for folder in lab.profiles]) for device in lab.devices}


def _artifacts(lab: Lab) -> dict[str, list[Path]]:
    """Return the artifacts that each device measures; a model is exported once per distinct plan."""
    from edgekit.apps.lab.exports import exported

    with progress_display() as progress:
        made = exported(lab, home() / "lab", progress)
    return {name: [*map(Path, lab.artifacts), *paths] for name, paths in made.items()}


def tell(event: EntryEvent) -> None:
    """Print an event of a run as a line on stderr."""
    entry = f"  {event.entry.id}  {event.entry.workload}, {event.entry.artifact}" if event.entry else ""
    click.echo(f"{event.device}: {event.state}{entry}{': ' + event.why if event.why else ''}", err=True)


def _newest(store: LabStore, lab: str) -> str:
    known = store.history(lab)
    if not known:
        raise InvalidInput(f"--resume last: lab {lab} has no run yet; leave it out")
    return known[0].id


def _reported(store: LabStore, name: str, files: LabReportFiles, as_json: bool) -> int:
    from edgekit.apps.bench import markdown as as_markdown
    from edgekit.apps.lab.report import exit_code, junit, report_of, rows_of

    against = store.lab(name).baseline
    rows = list(rows_of(store, name, against))
    report = report_of(store, name, rows, against)
    files.write(report, xml=lambda: junit(store, name, rows))
    if as_json:
        for row in rows:
            measured = store.result(name, row.entry.id)
            measurement = measured.model_dump(mode="json") if measured else None
            click.echo(json.dumps({"cell": row.entry.model_dump(), "state": row.state, "verdict": row.verdict,
                                   "why": row.why, "measurement": measurement}))  # fmt: skip
    else:
        click.echo(as_markdown(report))
    return exit_code(rows)
