"""`edgekit bench`: speed and memory of artifacts on this machine, and of other engines on the same integers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click
from pydantic import Field

from edgekit import OpenOptions, open_artifact
from edgekit.apps.bench.commands.reports import ReportFiles, show_report
from edgekit.commands import (
    OPENING,
    SectionedCommand,
    SomeFields,
    json_option,
    options,
    progress_display,
)
from edgekit.common.base import Frozen
from edgekit.common.bounds import Loads, Repeats
from edgekit.common.options import Option
from edgekit.errors import InvalidInput, TargetFailed


class BenchOptions(Frozen):
    """The subjects of a benchmark, how often each is measured, and what is given away."""

    workloads: Annotated[tuple[str, ...], Option(name="workload", short="w", default="quick")] = Field(
        default=(),
        description="A bundled workload (agent, chat, code, endless, grid, quick, summarise) or a YAML file.",
    )
    against: tuple[str, ...] = Field(
        default=(), description="Also llama.cpp, onnxruntime-genai or mlx-lm, on the same integers."
    )
    peer_python: str | None = Field(
        default=None, description="The Python with the packages of --against, instead of this one."
    )
    repeats: Repeats | None = Field(default=None, description="Trials of each case, instead of the workload's.")
    loads: Loads = Field(
        default=3, description="Fresh processes that share the trials; with 1, a slow process goes unnoticed."
    )
    share: Path | None = Field(
        default=None,
        description="Write the measurements there, to give away: no names of people or machines, paths or prompts.",
    )


_LONGEST_TITLE = 400  # characters
_EXAMPLES = """\b
Examples:
  edgekit bench my-artifact
  edgekit bench my-artifact --against llama.cpp -o report.html
"""


@click.command(cls=SectionedCommand, epilog=_EXAMPLES)
@click.argument("artifacts", nargs=-1, required=True)
@options(
    choice=BenchOptions,
    opening=SomeFields(OpenOptions, (*OPENING, "sequences", "prefixes")),
    files=ReportFiles,
)
@json_option("Print one Measurement a line, and nothing else.")
def command(
    artifacts: tuple[str, ...],
    choice: BenchOptions,
    opening: OpenOptions,
    files: ReportFiles,
    as_json: bool,
) -> int:
    """Measure ARTIFACTS on this machine.

    Each runs in its own process; trials take turns. Trials disturbed by other programs or heat are marked and left out
    of averages. Exits with 4 if an artifact has no undisturbed figure.
    """
    from edgekit.apps.bench.machine import Machine
    from edgekit.apps.bench.report.headline import context_of
    from edgekit.apps.bench.report.results import Report
    from edgekit.apps.bench.run import bench, expectations
    from edgekit.apps.bench.workload import read_workload

    files.check()
    if choice.peer_python is not None and not choice.against:
        raise InvalidInput("--peer-python: belongs to a peer; name one with --against, or leave it out")
    if opening.memory is not None:
        opening = opening.model_copy(update={"on_pressure": "refuse"})  # what is measured is what was asked for
    workloads = [read_workload(name).repeated(choice.repeats) for name in choice.workloads or ("quick",)]
    machine, measurements = Machine(), []
    for line in expectations(artifacts, workloads, choice.loads, machine):
        click.echo(line, err=True)
    with progress_display(as_json=False) as progress:
        for workload in workloads:
            measurements += bench(
                artifacts,
                workload,
                opening=opening,
                against=choice.against,
                peer_python=choice.peer_python,
                loads=choice.loads,
                machine=machine,
                progress=progress,
            )
    report = Report(title=context_of(measurements)[:_LONGEST_TITLE], measurements=tuple(measurements))
    files.write(report)
    if not as_json and all(each.status == "failed" for each in measurements):
        raise TargetFailed(measurements[0].why)
    if as_json:
        for each in measurements:
            click.echo(each.model_dump_json())
    else:
        show_report(report)
    own = [each for each in measurements if each.subject.artifact_sha256 is not None]
    if choice.share is not None:
        from edgekit.apps.bench.sharing import share

        plans = {opened.sha256: opened.plan for opened in map(open_artifact, map(Path, artifacts))}
        planned = [(each, plans[each.subject.artifact_sha256 or ""]) for each in own]
        share([(each, plan, plan.device) for each, plan in planned], choice.share)
    return 0 if all(each.status == "valid" for each in own) else 4
