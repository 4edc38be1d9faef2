"""The trip from a plan to a sealed artifact: neutral weights, the target's files, a self-check, one rename.

Knows no target by name. Whatever is interrupted leaves either no artifact or a whole one; neutral
weights go on from the layer where they stood.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgekit import plugins
from edgekit.artifact import Artifact, seal, staging_for
from edgekit.errors import InvalidInput, Unsupported
from edgekit.installed import versions_of
from edgekit.interfaces import Progress
from edgekit.plan import Plan
from edgekit.planning import with_what_was_done
from edgekit.recipe import Format, Kind, Recipe, Rule
from edgekit.self_check import self_check
from edgekit.source import open_source
from edgekit.store import Store
from edgekit.weights.neutral import NeutralWeights
from edgekit.weights.quantise import neutral_weights, quiet
from edgekit.weights.safetensors import TensorFolder
from edgekit.weights.sources import companions

if TYPE_CHECKING:
    from edgekit.weights.calibration import Calibration
    from edgekit.weights.neutral import Method

_TOOLS = (
    "edgekit",
    "numpy",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnx-ir",
    "mlx",
    "mlx-lm",
    "executorch",
    "torch",
    "torchao",
)


def export(
    plan: Plan,
    out: str | Path,
    *,
    calibration: Calibration | None = None,
    method: Method | None = None,
    store: Store | None = None,
    progress: Progress = quiet,
) -> Artifact:
    """Build what `plan` says and seal it at `out`, which must not exist."""
    final = Path(out)
    if plan.model.exportable is not None:
        raise Unsupported(f"{plan.model_source}: {plan.model.exportable}")
    target = plugins.load_target(plan.target)
    staging = staging_for(final, plan.estimate.disk_bytes)
    try:
        weights = _weights(plan, calibration, method, store, progress)
        if not plan.recipe.is_native():
            plan = plan.model_copy(update={"recipe": weights.recipe})  # a budget of bits is now rules for each module
            plan = with_what_was_done(plan, weights.manifest)
        target.export(plan, weights, staging, _named(progress, f"{plan.target} {plan.backend}"))
        for path in companions(weights.folder):
            if not (staging / path.name).exists():
                shutil.copyfile(path, staging / path.name)
        checked = self_check(target, plan, weights, staging, progress)
        return seal(staging, final, plan, weights_sha256=weights.sha256, tools=tools(), self_check=checked)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def export_all(
    plans: Sequence[Plan],
    out: str | Path,
    *,
    calibration: Calibration | None = None,
    method: Method | None = None,
    store: Store | None = None,
    progress: Progress = quiet,
) -> list[Artifact]:
    """One artifact at `out`, or one a device in folders below it; plans of one recipe share one quantisation."""
    places = [Path(out)] if len(plans) == 1 else [Path(out) / plan.device for plan in plans]
    for place in places:
        if place.exists():
            raise InvalidInput(f"{place}: exists already; an artifact is never overwritten: choose another path")
    return [
        export(plan, place, calibration=calibration, method=method, store=store, progress=progress)
        for plan, place in zip(plans, places, strict=True)
    ]


def tools() -> dict[str, str]:
    """The versions of everything that may have had a hand in an artifact."""
    return versions_of(_TOOLS)


def _weights(
    plan: Plan, calibration: Calibration | None, method: Method | None, store: Store | None, progress: Progress
) -> NeutralWeights:
    folder = Path(plan.model_source)
    if (folder / "edgekit.json").is_file():
        weights = NeutralWeights.open(folder)
        if weights.recipe != plan.recipe:
            raise InvalidInput(
                f"{folder}: holds neutral weights of recipe {weights.recipe.name}, and the plan asks for"
                f" {plan.recipe.name}; leave --recipe away, or give the float model"
            )
        if calibration is not None or method is not None:
            raise InvalidInput(f"{folder}: holds integers already; --calibrate and --method need the float model")
        return weights
    source = open_source(plan.model_source, need_weights=True)
    if source.config_sha256 != plan.model_sha256:
        raise InvalidInput(f"{plan.model_source}: its config.json is not the one that was planned; plan again")
    if plan.recipe.is_native():
        if calibration is not None or method is not None:
            raise InvalidInput(
                f"recipe {plan.recipe.name} is a vendor's own format; it takes no --calibrate or --method"
            )
        recipe = _as_it_is(source.folder)
    else:
        recipe = plan.recipe
    return neutral_weights(source, recipe, method=method, calibration=calibration, store=store, progress=progress)


def _as_it_is(folder: Path) -> Recipe:
    """Float weights without any loss: in the type that all of them have, else in float32."""
    kinds: dict[str, Kind] = {"BF16": "bfloat16", "F16": "float16"}
    with TensorFolder.open(folder) as tensors:
        found = {entry.dtype for entry in tensors.entries.values()}
    kind = kinds.get(found.pop(), "float32") if len(found) == 1 else "float32"
    return Recipe(name=kind, rules=(Rule(pattern="*", format=Format(kind=kind)),), float_format=Format(kind=kind))


def _named(progress: Progress, task: str) -> Progress:
    def tell(done: float, total: float, what: str) -> None:
        progress(done, total, f"{task}: {what}")

    return tell
