"""Tests the bench on this machine: run twice it agrees within its own spread, and busy processes beside it are noticed.

Run it on an idle machine:

    python -m examples.benchmarks.bench_twice ARTIFACT [--workload quick] [-o docs/data/bench-twice.json]
It exits with 1 where two runs of one artifact are said to differ, or where a trial beside busy neighbours counts, and
with 4 where the machine was too busy to compare anything.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from edgekit.apps.bench.measurement import Measurement
from edgekit.apps.bench.report.compare import Comparison, compare_runs
from edgekit.apps.bench.report.results import Figures, Report, to_json
from edgekit.apps.bench.run import bench
from edgekit.apps.bench.workload import Workload, read_workload
from edgekit.common.files import write_file
from edgekit.device.detect.surroundings import local_host


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifact")
    parser.add_argument("--workload", "-w", default="quick")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--output", "-o", type=Path)
    arguments = parser.parse_args()
    workload = read_workload(arguments.workload).model_copy(update={"repeats": arguments.repeats})
    first, second = (measured(arguments.artifact, workload) for _ in range(2))
    with busy_neighbours(2 * local_host().cores_allowed()):
        beside = measured(arguments.artifact, workload.model_copy(update={"repeats": 3}))
    found = compare_runs(first, second)
    report = Report(
        title=f"The same bench twice: {workload.name} on {first[0].subject.model} as {first[0].subject.name}",
        tables=(agreement(found), notice(beside)),
        notes=tuple(f"{one.workload}: {one.status}: {one.why}" for one in (*first, *second) if one.status != "valid"),
    )
    print(to_json(report))
    if arguments.output:
        write_file(arguments.output, to_json(report).encode())
    differ = any(each.verdict in ("better", "worse") for each in found.differences)
    counted = any(trial.invalid is None for case in beside[0].cases for trial in case.trials)
    if differ or counted:
        return 1
    return 0 if all(one.status == "valid" for one in (*first, *second)) else 4


def measured(artifact: str, workload: Workload) -> Sequence[Measurement]:
    def progress(done: float, total: float, what: str) -> None:
        print(f"{done / total:.0%} {what}", file=sys.stderr)

    return bench([artifact], workload, progress=progress)


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Keep `count` processes busy."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.wait()


def agreement(found: Comparison) -> Figures:
    return Figures(
        title="Twice, one after the other",
        head=("case", "metric", "first", "second", "change", "spread of both", "verdict"),
        rows=tuple(
            (
                each.case,
                each.metric,
                "" if each.before is None else f"{each.before:.4g}",
                "" if each.after is None else f"{each.after:.4g}",
                "" if each.change is None else f"{each.change:+.1%}",
                "" if each.noise is None else f"{each.noise:.1%}",
                each.verdict,
            )
            for each in found.differences
        ),
        source="examples/benchmarks/bench_twice.py",
    )


def notice(beside: Sequence[Measurement]) -> Figures:
    return Figures(
        title="Beside two busy processes a core",
        head=("case", "trials", "marked as disturbed", "counted"),
        rows=tuple(
            (
                case.case,
                str(len(case.trials)),
                str(sum(trial.invalid is not None for trial in case.trials)),
                str(sum(trial.invalid is None for trial in case.trials)),
            )
            for one in beside
            for case in one.cases
        ),
        source="examples/benchmarks/bench_twice.py",
    )


if __name__ == "__main__":
    sys.exit(main())
