"""Sweeps recipes of one model on one device: exports, measures and evaluates every recipe, and finds dominated ones.

Each recipe is planned, built, benchmarked and evaluated by the same code as in the single commands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import edgekit
from edgekit import Plan, open_artifact
from edgekit.apps.bench.eval.evaluate import TEXT_TOKENS, evaluate
from edgekit.apps.bench.eval.evaluation import Evaluation
from edgekit.apps.bench.measurement import Measurement
from edgekit.apps.bench.report.results import Point, Report, pareto
from edgekit.apps.bench.run import bench
from edgekit.apps.bench.statistics import shown_summary
from edgekit.apps.bench.workload import Workload
from edgekit.common.progress import Progress
from edgekit.common.ray_map import executor_of
from edgekit.contracts.manifest import MANIFEST
from edgekit.errors import EdgekitError, InvalidInput

MakePlan = Callable[[str], Plan]  # from the name of a recipe


def sweep(
    recipes: Sequence[str],
    make_plan: MakePlan,
    out: Path,
    workload: Workload,
    *,
    calibration: Any = None,  # as `edgekit.export(calibrate=...)` takes it; None: rounded to the nearest
    text: Path | None = None,
    tokens: int = TEXT_TOKENS,
    cluster: str | None = None,
    progress: Progress,
) -> Report:
    """Export each recipe to a folder below `out`, measure and evaluate it; artifacts of the same plan are reused.

    A recipe that cannot be built becomes a note. A Ray cluster, if there is one, builds and evaluates; it is shut down
    before this machine measures the recipes one after the other.
    """
    if len(set(recipes)) < len(recipes):
        raise InvalidInput("a recipe is named twice in --recipes; name each once")
    notes: list[str] = []
    jobs: list[_SweepJob] = []
    for recipe in recipes:
        try:
            jobs.append(_SweepJob(recipe, make_plan(recipe), out, calibration, text, tokens))
        except EdgekitError as error:
            notes.append(f"{recipe}: not built: {error}")
    built: dict[str, Path] = {}
    evaluated: dict[str, Evaluation] = {}
    out.mkdir(parents=True, exist_ok=True)
    with executor_of(cluster, (out,)) as execute:
        for job, folder in zip(jobs, execute(_export, jobs, progress), strict=True):
            if isinstance(folder, EdgekitError):
                notes.append(f"{job.recipe}: not built: {folder}")
            else:
                built[job.recipe] = folder
        if not built:
            raise InvalidInput(f"none of these recipes could be built: {'; '.join(notes)}")
        whole = [job for job in jobs if job.recipe in built]
        for job, evaluation in zip(whole, execute(_evaluate, whole, progress), strict=True):
            if isinstance(evaluation, EdgekitError):
                notes.append(f"{job.recipe}: not evaluated: {evaluation}")
            else:
                evaluated[job.recipe] = evaluation
    measured = bench(list(built.values()), workload, progress=progress)
    measurements_of = dict(zip(built, measured, strict=True))
    points = pareto([_point(recipe, measurements_of[recipe], evaluated.get(recipe)) for recipe in built])
    return Report(
        title=f"{measured[0].subject.model} on {measured[0].subject.device or 'this device'}: {', '.join(built)}"[:400],
        measurements=tuple(measured),
        evaluations=tuple(evaluated.values()),
        points=points,
        notes=tuple(notes),
    )


class _SweepJob(NamedTuple):
    """One recipe, with everything for building and evaluating it on any machine."""

    recipe: str
    plan: Plan
    out: Path
    calibration: Any
    text: Path | None
    tokens: int

    @property
    def folder(self) -> Path:
        return self.out / self.recipe


def _export(job: _SweepJob, progress: Progress) -> Path:
    """Return the artifact of a recipe: a new one, or an earlier sweep's of the same plan."""
    folder, plan = job.folder, job.plan
    if (folder / MANIFEST).is_file():
        known = open_artifact(folder).plan
        same = (known.model_sha256, known.target, known.backend, known.recipe, known.storage)
        if same != (plan.model_sha256, plan.target, plan.backend, plan.recipe, plan.storage):
            raise InvalidInput(f"{folder}: holds an artifact of another plan; choose another folder with -o")
        return folder
    report = edgekit.Reporter(progress)
    if job.calibration is None:
        return edgekit.export(plan, folder, effort="quick", report=report).folder
    return edgekit.export(plan, folder, calibrate=job.calibration, report=report).folder


def _evaluate(job: _SweepJob, progress: Progress) -> Evaluation:
    return evaluate(job.folder, text=job.text, tokens=job.tokens, progress=progress)


def _point(recipe: str, measured: Measurement, evaluated: Evaluation | None) -> Point:
    """Return the point of a recipe, with the speed of the last (deepest) case, undisturbed if possible."""
    shown = [speed for case in measured.cases if (speed := shown_summary(case, "decode_tokens_per_s")) is not None]
    speeds = [speed for speed in shown if not speed.is_disturbed] or shown
    divergence = evaluated.divergence if evaluated else None
    return Point(
        name=recipe,
        decode_tokens_per_s=speeds[-1].summary.median if speeds else None,
        is_disturbed=bool(speeds) and speeds[-1].is_disturbed,
        kl=divergence.kl_mean if divergence else None,
        same_top=divergence.same_top if divergence else None,
        memory_bytes=measured.memory.peak_bytes,
        file_bytes=measured.subject.formats.file_bytes,
    )
