"""`edgekit bench`: how fast artifacts are here, what memory they take, and how others do on the same integers."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from edgekit.cli._progress import progress_display
from edgekit.cli._reports import check_reports, show_measurements, write_reports
from edgekit.errors import InvalidInput, TargetFailed

_LONGEST_TITLE = 400


@click.command()
@click.argument("artifacts", nargs=-1, required=True)
@click.option(
    "--workload",
    "-w",
    "workloads",
    multiple=True,
    help="A bundled workload (agent, chat, code, endless, grid, quick, summarise) or a YAML file; may be repeated."
    "  [default: grid]",
)
@click.option(
    "--against",
    multiple=True,
    help="Also llama.cpp, onnxruntime-genai, mlx-lm or transformers, on the same integers; may be repeated.",
)
@click.option("--peer-python", help="The Python in which those are installed, instead of this one.")
@click.option("--weights", type=Path, help="The neutral weights of the first artifact, where the store lacks them.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Trials of each case, instead of the workload's.")
@click.option(
    "--loads", type=click.IntRange(1, 100), default=3, show_default=True, help="Fresh processes that share the trials."
)
@click.option("--context", type=click.IntRange(2), help="Keep at most this many tokens; at most what was planned.")
@click.option("--window", type=click.IntRange(2), help="Keep only the newest tokens, sinks included.")
@click.option(
    "--sinks", type=click.IntRange(0), default=0, show_default=True, help="First tokens that a window never drops."
)
@click.option("--memory", help="Most private memory of each process, e.g. 1.5GiB; nothing is degraded for it.")
@click.option(
    "--kv-bits", type=click.IntRange(1, 32), help="Bits of a key or value, where the engine can; as planned without it."
)
@click.option("--exact", is_flag=True, help="Open in exact mode, where chunking never changes a result.")
@click.option(
    "--draft",
    metavar="PATH|ngram|early-exit|auto|off",
    default="off",
    show_default=True,
    help="Who proposes tokens that the model verifies: the same text, sooner where that pays.",
)
@click.option("--adapter", metavar="NAME=PATH", help="A LoRA adapter (a PEFT folder) that every request uses.")
@click.option(
    "--sequences",
    type=click.IntRange(1, 256),
    help="Users at once, each asking all that a case asks, in words of their own at the end of a prompt.",
)
@click.option(
    "--prefixes",
    metavar="SIZE",
    help="Keep so much of computed prompts, e.g. 64MiB, for later requests of a trial; each trial begins with none.",
)
@click.option(
    "--stats", is_flag=True, help="Also show memory by class, and how drafting did, by place, and why it is on or off."
)
@click.option(
    "--profile",
    is_flag=True,
    help="Instead, where the time goes, operator by operator; on targets whose vendor tells.  [workload: quick]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one Measurement a line, and nothing else.")
@click.option("--output", "-o", type=Path, help="Write the whole report here as JSON.")
@click.option("--html", type=Path, help="Write it here as one HTML page.")
@click.option("--markdown", type=Path, help="Write it here as Markdown.")
@click.option("--title", default="Benchmark", show_default=True, help="What the report is called.")
def command(
    artifacts: tuple[str, ...],
    workloads: tuple[str, ...],
    against: tuple[str, ...],
    peer_python: str | None,
    weights: Path | None,
    repeats: int | None,
    loads: int,
    context: int | None,
    window: int | None,
    sinks: int,
    memory: str | None,
    kv_bits: int | None,
    exact: bool,
    draft: str,
    adapter: str | None,
    sequences: int | None,
    prefixes: str | None,
    stats: bool,
    profile: bool,
    as_json: bool,
    output: Path | None,
    html: Path | None,
    markdown: Path | None,
    title: str,
) -> int:
    """Measure ARTIFACTS on this machine.

    Each runs in a process of its own; trials take turns, and one that was disturbed by a neighbour or by heat is marked
    and never averaged in. Exits with 4 where an artifact gave no undisturbed number.
    """
    if profile:
        from edgekit.cli import _profiles

        return _profiles.run(artifacts, workloads, _others(click.get_current_context()), as_json=as_json)
    from edgekit.cli._answering import adapter_of
    from edgekit.measure.contest import bench
    from edgekit.measure.entrants import Opening, readable
    from edgekit.measure.results import Report
    from edgekit.measure.workload import read_workload

    check_reports(output, html, markdown)
    for name, value in (("--peer-python", peer_python), ("--weights", weights)):
        if value is not None and not against:
            raise InvalidInput(f"{name}: belongs to a peer; name one with --against, or leave it away")
    if len(title) > _LONGEST_TITLE:
        raise InvalidInput(f"--title: {len(title):,} characters, and at most {_LONGEST_TITLE} are allowed; shorten it")
    opening = Opening(
        context=context,
        window=window,
        sinks=sinks,
        exact=exact,
        draft=draft if draft != "off" else None,
        memory=memory,
        kv_bits=kv_bits,
        on_pressure="refuse" if memory is not None else None,
        sequences=sequences,
        prefixes=prefixes,
        adapter=adapter_of(adapter) if adapter is not None else None,
    )
    asked = [read_workload(name) for name in workloads or ("grid",)]
    if repeats is not None:
        asked = [one.model_copy(update={"repeats": repeats}) for one in asked]
    found = []
    with progress_display(as_json=False) as progress:
        for one in asked:
            found += bench(
                artifacts,
                one,
                opening=opening,
                against=against,
                peer_python=peer_python,
                weights=weights,
                loads=loads,
                progress=progress,
            )
    report = Report(title=readable(title), measurements=tuple(found))
    write_reports(report, output, html, markdown)
    if not as_json and all(each.status == "failed" for each in found):
        raise TargetFailed(found[0].why)
    if as_json:
        for each in found:
            click.echo(each.model_dump_json())
    else:
        show_measurements(found, stats=stats)
    own = [each for each in found if each.arm.artifact_sha256 is not None]
    return 0 if all(each.status == "valid" for each in own) else 4


def _others(context: click.Context) -> dict[str, object]:
    """What was given besides that a profile does not hear, by flag."""
    heard = ("artifacts", "workloads", "profile", "as_json")
    return {
        parameter.opts[0]: context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        for parameter in context.command.params
        if parameter.name not in heard
    }
