"""The artifacts that a lab's models become: one for each plan that differs, however many devices share it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from edgekit.artifact import open_artifact
from edgekit.cluster import fan_of
from edgekit.errors import EdgekitError
from edgekit.export import export
from edgekit.interfaces import Progress
from edgekit.lab.matrix import Lab
from edgekit.plan import Plan
from edgekit.planning import find_recipe, make_plans
from edgekit.resolve import Wish


def exported(lab: Lab, folder: Path, progress: Progress, cluster: str | None = None) -> dict[str, list[Path]]:
    """For each device the folders of its artifacts; what was exported before is found again.

    A Ray cluster builds what is missing, each on one of its nodes, and is gone before anything is measured.
    """
    made: dict[str, list[Path]] = {device.name: [] for device in lab.devices}
    missing: dict[Path, Plan] = {}
    for entry in lab.models:
        wish = Wish(recipe=find_recipe(entry.recipe) if entry.recipe else None, context=entry.context)
        plans = make_plans(
            entry.model,
            [device.profile for device in lab.devices],
            wish,
            per_device=True,
            profiles=[Path(path) for path in lab.profiles],
        )
        for device, plan in zip(lab.devices, plans, strict=True):
            key = hashlib.sha256(plan.to_json().encode()).hexdigest()[:16]
            said = re.sub(r"[^A-Za-z0-9._-]", "_", f"{plan.model.name}-{plan.target}-{plan.recipe.name}-{plan.context}")
            path = folder / f"{said[:120]}-{key}"
            made[device.name].append(path)
            if path not in missing and not _is_whole(path):
                missing[path] = plan
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with fan_of(cluster, (folder,)) as fan:
            for failed in fan(_built, list(missing.items()), progress):
                if isinstance(failed, EdgekitError):
                    raise failed
    return made


def _built(asked: tuple[Path, Plan], progress: Progress) -> None:
    path, plan = asked
    export(plan, path, progress=progress)


def _is_whole(path: Path) -> bool:
    try:
        open_artifact(path)
    except EdgekitError:
        return False
    return True
