"""Exports a lab's models: one artifact per distinct plan, possibly shared by several devices."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import edgekit
from edgekit import Plan, open_artifact
from edgekit.apps.lab.matrix import Lab
from edgekit.common.progress import Progress
from edgekit.errors import EdgekitError


def exported(lab: Lab, folder: Path, progress: Progress) -> dict[str, list[Path]]:
    """Return each device's artifact folders; artifacts of earlier runs are reused, missing ones are built."""
    folders: dict[str, list[Path]] = {device.name: [] for device in lab.devices}
    missing: dict[Path, Plan] = {}
    for entry in lab.models:
        for device in lab.devices:
            plan = edgekit.plan(
                entry.model, device.profile, recipe=entry.recipe, context=entry.context, profiles=lab.profiles
            )
            key = hashlib.sha256(plan.to_json().encode()).hexdigest()[:16]
            label = re.sub(
                r"[^A-Za-z0-9._-]", "_", f"{plan.model.name}-{plan.target}-{plan.recipe.name}-{plan.context}"
            )
            path = folder / f"{label[:120]}-{key}"
            folders[device.name].append(path)
            if path not in missing and not _is_sealed(path):
                missing[path] = plan
    for path, plan in missing.items():
        folder.mkdir(parents=True, exist_ok=True)
        edgekit.export(plan, path, effort="quick", report=edgekit.Reporter(progress))
    return folders


def _is_sealed(path: Path) -> bool:
    try:
        open_artifact(path)
    except EdgekitError:
        return False
    return True
