"""`edgekit bench --profile`: the time of an artifact's operators on each workload, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from edgekit.apps.bench.commands.reports import show
from edgekit.commands import progress_display
from edgekit.errors import InvalidInput

if TYPE_CHECKING:
    from edgekit.apps.bench.profiling import CaseProfile
    from edgekit.contracts.target import Phase

_FEWEST_PERCENT = 0.1


def run(artifacts: Sequence[str], workloads: Sequence[str], others: Sequence[str], *, as_json: bool) -> int:
    """Profile every artifact on every workload. `others`: given options that do not apply, which are refused."""
    from edgekit.apps.bench.profiling import profile
    from edgekit.apps.bench.workload import read_workload

    if others:
        raise InvalidInput(f"--profile does not take {', '.join(others)}; leave it out")
    cases = [read_workload(name) for name in workloads or ("quick",)]
    with progress_display(as_json=False) as progress:
        profiles = [each for path in artifacts for workload in cases for each in profile(path, workload, progress)]
    for each in profiles:
        if as_json:
            click.echo(each.model_dump_json())
        else:
            for phase in each.profile.phases:
                _show_phase(each, phase)
    return 0


def _show_phase(profiled: CaseProfile, phase: Phase) -> None:
    from edgekit.apps.bench.report.cells import Table

    rows, little_s = [], 0.0
    for one in phase.operators:
        percent = 100 * one.total_s / phase.total_s if phase.total_s else 0.0
        if percent < _FEWEST_PERCENT:
            little_s += 0.0 if one.part_of else one.total_s
            continue
        name = f"  {one.name} (in {one.part_of})" if one.part_of else one.name
        rows.append((name, f"{one.calls:,}", f"{one.total_s * 1e3 / phase.steps:.3f}", f"{percent:.1f} %"))
    if little_s:
        rows.append(
            ("each below 0.1 %", "", f"{little_s * 1e3 / phase.steps:.3f}", f"{100 * little_s / phase.total_s:.1f} %")
        )
    show(
        Table(
            f"{profiled.artifact}, {profiled.case}: {phase.name} of {phase.tokens:,} tokens, "
            f"{phase.total_s * 1e3:.2f} ms in {phase.steps:,} steps, {profiled.profile.threads} threads",
            ("operator", "calls", "ms a step", "share"),
            tuple(rows),
            f"timed by the engine's own profiler; load average {profiled.load_average}",
        )
    )
