"""Several recipes of one model on one device: exported, measured and evaluated, and which of them are worth having.

Each recipe is planned, built, benched and evaluated by the same code as the single commands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from edgekit.artifact import MANIFEST, open_artifact
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
    progress: Progress,
) -> Report:
    """Artifacts in folders below `out`, which are taken as they are where they exist; and what was found of them.

    A recipe that cannot be built is a note, never the end of the sweep.
    """
    if len(set(recipes)) < len(recipes):
        raise InvalidInput("a recipe stands twice in --recipes; name each once")
    built: dict[str, Path] = {}
    notes: list[str] = []
    for recipe in recipes:
        try:
            built[recipe] = _artifact(recipe, make_plan(recipe), out, calibration, progress)
        except EdgekitError as error:
            notes.append(f"{recipe}: not built: {error}")
    if not built:
        raise InvalidInput(f"none of these recipes could be built: {'; '.join(notes)}")
    measured = bench(list(built.values()), workload, progress=progress)
    evaluated: dict[str, Evaluation] = {}
    for recipe, path in built.items():
        try:
            evaluated[recipe] = evaluate(path, reference=reference, text=text, tokens=tokens, progress=progress)
        except EdgekitError as error:
            notes.append(f"{recipe}: not evaluated: {error}")
    found = dict(zip(built, measured, strict=True))
    points = pareto([_point(recipe, found[recipe], evaluated.get(recipe)) for recipe in built])
    return Report(
        title=f"{measured[0].arm.model} on {measured[0].arm.device or 'this device'}: {', '.join(built)}"[:400],
        measurements=tuple(measured),
        evaluations=tuple(evaluated.values()),
        points=points,
        notes=tuple(notes),
    )


def _artifact(recipe: str, plan: Plan, out: Path, calibration: Calibration | None, progress: Progress) -> Path:
    """The artifact of a recipe: built now, or what an earlier sweep left of the same plan."""
    place = out / recipe
    if (place / MANIFEST).is_file():
        known = open_artifact(place).plan
        same = (known.model_sha256, known.target, known.backend, known.recipe, known.storage)
        if same != (plan.model_sha256, plan.target, plan.backend, plan.recipe, plan.storage):
            raise InvalidInput(f"{place}: holds an artifact of another plan; choose another folder with -o")
        return place
    out.mkdir(parents=True, exist_ok=True)
    return export(plan, place, calibration=calibration, progress=progress).folder


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
