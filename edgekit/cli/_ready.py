"""The artifacts that come with edgekit, and whether one is what would be chosen here."""

from __future__ import annotations

from edgekit.artifact.artifact import Artifact, read_manifest
from edgekit.common.packages import version_of
from edgekit.contracts.plan import Plan
from edgekit.model.source import BUNDLED, BUNDLED_ARTIFACTS
from edgekit.plugins import load_target, target_names


def ready_artifact(model: str, context: int | None) -> Artifact | None:
    """Return the artifact that comes with edgekit for a bundled model; None if the context needs another one."""
    if model not in BUNDLED:
        return None
    artifact = read_manifest(BUNDLED_ARTIFACTS / model)
    return artifact if context is None or context <= artifact.plan.context else None


def is_only_runtime(target: str) -> bool:
    """Return whether no other target could be chosen here; which one is best is for the planner to say."""
    working = [name for name in target_names() if load_target(name).missing() is None]
    return working == [target] and version_of("onnxruntime-gpu") is None  # which may run it on a GPU


def chosen(plan: Plan) -> str:
    """Return target, backend and recipe of a plan, as one text."""
    return f"{plan.target} {plan.backend} {plan.recipe.name}"
