"""Several recipes of one model on one device: exported, measured and evaluated, and which of them are worth having.

Each recipe is planned, built, benched and evaluated by the same code as the single commands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from edgekit.artifact import MANIFEST, open_artifact
from edgekit.cluster import fan_of
from edgekit.errors import EdgekitError, InvalidInput
from edgekit.export import export
from edgekit.interfaces import Progress
from edgekit.measure.contest import bench
from edgekit.measure.evaluation import Evaluation
from edgekit.measure.measurement import Measurement
from edgekit.measure.quality import TEXT_TOKENS, evaluate
from edgekit.measure.results import Point, Report, pareto
from edgekit.measure.workload import Workload
from edgekit.plan import Plan
from edgekit.weights.calibration import Calibration

MakePlan = Callable[[str], Plan]  # of a recipe's name


def sweep(
    recipes: Sequence[str],
    make_plan: MakePlan,
    out: Path,
    workload: Workload,
    *,
    calibration: Calibration | None = None,
    reference: str | None = None,
    text: Path | None = None,
    tokens: int = TEXT_TOKENS,
    cluster: str | None = None,
    progress: Progress,
) -> Report:
    """Artifacts in folders below `out`, which are taken as they are where they exist; and what was found of them.

    A recipe that cannot be built is a note, never the end of the sweep. A Ray cluster builds and evaluates; it is gone
    before anything is measured, which happens here, one after the other.
    """
    if len(set(recipes)) < len(recipes):
        raise InvalidInput("a recipe stands twice in --recipes; name each once")
    notes: list[str] = []
    jobs: list[_Job] = []
    for recipe in recipes:
        try:
            jobs.append(_Job(recipe, make_plan(recipe), out, calibration, reference, text, tokens))
        except EdgekitError as error:
            notes.append(f"{recipe}: not built: {error}")
    built: dict[str, Path] = {}
    evaluated: dict[str, Evaluation] = {}
    out.mkdir(parents=True, exist_ok=True)
    with fan_of(cluster, (out,)) as fan:
        for job, place in zip(jobs, fan(_artifact, jobs, progress), strict=True):
            if isinstance(place, EdgekitError):
                notes.append(f"{job.recipe}: not built: {place}")
            else:
                built[job.recipe] = place
        if not built:
            raise InvalidInput(f"none of these recipes could be built: {'; '.join(notes)}")
        whole = [job for job in jobs if job.recipe in built]
        for job, evaluation in zip(whole, fan(_evaluated, whole, progress), strict=True):
            if isinstance(evaluation, EdgekitError):
                notes.append(f"{job.recipe}: not evaluated: {evaluation}")
            else:
                evaluated[job.recipe] = evaluation
    measured = bench(list(built.values()), workload, progress=progress)
    found = dict(zip(built, measured, strict=True))
    points = pareto([_point(recipe, found[recipe], evaluated.get(recipe)) for recipe in built])
    return Report(
        title=f"{measured[0].arm.model} on {measured[0].arm.device or 'this device'}: {', '.join(built)}"[:400],
        measurements=tuple(measured),
        evaluations=tuple(evaluated.values()),
        points=points,
        notes=tuple(notes),
    )


class _Job(NamedTuple):
    """One recipe, with all that a machine needs to build and evaluate it."""

    recipe: str
    plan: Plan
    out: Path
    calibration: Calibration | None
    reference: str | None
    text: Path | None
    tokens: int

    @property
    def place(self) -> Path:
        return self.out / self.recipe


def _artifact(job: _Job, progress: Progress) -> Path:
    """The artifact of a recipe: built now, or what an earlier sweep left of the same plan."""
    place, plan = job.place, job.plan
    if (place / MANIFEST).is_file():
        known = open_artifact(place).plan
        same = (known.model_sha256, known.target, known.backend, known.recipe, known.storage)
        if same != (plan.model_sha256, plan.target, plan.backend, plan.recipe, plan.storage):
            raise InvalidInput(f"{place}: holds an artifact of another plan; choose another folder with -o")
        return place
    return export(plan, place, calibration=job.calibration, progress=progress).folder


def _evaluated(job: _Job, progress: Progress) -> Evaluation:
    return evaluate(job.place, reference=job.reference, text=job.text, tokens=job.tokens, progress=progress)


def _point(recipe: str, measured: Measurement, evaluated: Evaluation | None) -> Point:
    """Where a recipe stands: its speed at the last case that was not disturbed, which is the deepest."""
    speeds = [case.summary.get("decode_tokens_per_s") for case in measured.cases]
    known = [speed.median for speed in speeds if speed is not None]
    divergence = evaluated.divergence if evaluated else None
    return Point(
        name=recipe,
        decode_tokens_per_s=known[-1] if known else None,
        kl=divergence.kl_mean if divergence else None,
        same_top=divergence.same_top if divergence else None,
        memory_bytes=measured.memory.peak_bytes,
        file_bytes=measured.arm.formats.file_bytes,
    )
