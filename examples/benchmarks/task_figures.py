"""Runs public tasks on exported artifacts and writes the results as a report; the first artifact is the reference.

    edgekit export smollm2.gguf --target onnx --sequences 8 --context 2048 --recipe float32 -o float32.edgekit
    edgekit export smollm2.gguf --target onnx --sequences 8 --context 2048 --recipe s8 -o s8.edgekit
    python -m examples.benchmarks.task_figures float32.edgekit s8.edgekit -o docs/data/tasks.json \
        --task hellaswag --task truthfulqa --task gsm8k=40 --task humaneval=80

A number after a task limits its items. What the output holds of other tasks stays in it. humaneval runs the programs
that the model writes, isolated. An interrupted run goes on where it stood.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

from edgekit.apps.bench.report.results import Report, read_report, to_json
from edgekit.apps.bench.tasks.results import TaskComparison, TaskReport, TaskResult
from edgekit.apps.bench.tasks.run import TASKS, TaskOptions, run_tasks
from edgekit.apps.bench.tasks.statistics import paired
from edgekit.common.files import write_output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--task", action="append", required=True, metavar="NAME[=LIMIT]")
    parser.add_argument("--note", action="append", default=[], help="A sentence for the report.")
    parser.add_argument("--title", default="Public tasks")
    parser.add_argument("--second-too", action="store_true", help="compare the second artifact with those after it too")
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    reports = [run_one(arguments.artifacts, *each.split("=")) for each in arguments.task]
    if arguments.second_too:
        reports = [with_second(report) for report in reports]
    names = {result.task for report in reports for result in report.results}
    before = read_report(arguments.output).tasks if arguments.output.exists() else None
    kept = [before] if before else []
    whole = TaskReport(
        results=tuple(each for report in kept for each in report.results if each.task not in names)
        + tuple(short(each) for report in reports for each in report.results),
        comparisons=tuple(each for report in kept for each in report.comparisons if each.task not in names)
        + tuple(each for report in reports for each in report.comparisons),
    )
    machine = f"{platform.machine()}, {platform.system()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}"
    notes = (
        f"Answered greedily on one machine ({machine}): where others use it too, processor time says more than time.",
        *arguments.note,
    )
    report = Report(title=arguments.title, tasks=whole, notes=notes)
    write_output(arguments.output, to_json(report).encode())


def run_one(artifacts: list[Path], name: str, limit: str | None = None) -> TaskReport:
    options = TaskOptions(limit=int(limit) if limit else None, allow_code=TASKS[name].runs_code)

    def tell(done: float, total: float, what: str) -> None:
        print(f"{done:.0f} of {total:.0f}  {what}", flush=True)

    return run_tasks(artifacts, [name], options, tell)


def with_second(report: TaskReport) -> TaskReport:
    """Add comparisons of the second artifact with each one after it."""
    _, second, *others = report.results

    def right(result: TaskResult) -> list[bool]:
        return [outcome.right for outcome in result.outcomes]

    further = tuple(
        TaskComparison(
            task=second.task,
            artifact=second.artifact,
            reference=other.artifact,
            paired=paired(right(second), right(other)),
        )
        for other in others
    )
    return report.model_copy(update={"comparisons": (*report.comparisons, *further)})


def short(result: TaskResult) -> TaskResult:
    """Return the results without the reasons for each item, which are not published."""
    kept = tuple(outcome.model_copy(update={"why": ""}) for outcome in result.outcomes)
    return result.model_copy(update={"outcomes": kept})


if __name__ == "__main__":
    main()
