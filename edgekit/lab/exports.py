"""The artifacts that a lab's models become: one for each plan that differs, however many devices share it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from edgekit.artifact import open_artifact
from edgekit.errors import EdgekitError
from edgekit.export import export
from edgekit.interfaces import Progress
from edgekit.lab.matrix import Lab
from edgekit.planning import find_recipe, make_plans
from edgekit.resolve import Wish


def exported(lab: Lab, folder: Path, progress: Progress) -> dict[str, list[Path]]:
    """For each device the folders of its artifacts; what was exported before is found again."""
    made: dict[str, list[Path]] = {device.name: [] for device in lab.devices}
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
            path = folder / f"{plan.model.name}-{hashlib.sha256(plan.to_json().encode()).hexdigest()[:16]}"
            if not _is_whole(path):
                export(plan, path, progress=progress)
            made[device.name].append(path)
    return made


def _is_whole(path: Path) -> bool:
    try:
        open_artifact(path)
    except EdgekitError:
        return False
    return True
