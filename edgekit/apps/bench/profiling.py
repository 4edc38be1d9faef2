"""Profiles of requests by operator, for targets whose vendor reports them."""

from __future__ import annotations

import os
from pathlib import Path

from edgekit import open_artifact
from edgekit.apps.bench.prompts import encoder_of, tokens_of
from edgekit.apps.bench.subject import context_error
from edgekit.apps.bench.workload import Workload
from edgekit.common.base import Frozen
from edgekit.common.progress import Progress
from edgekit.contracts.target import Profile
from edgekit.errors import Unsupported


class CaseProfile(Frozen):
    """The profile of one case on one artifact."""

    artifact: str
    artifact_sha256: str
    target: str
    backend: str
    recipe: str
    workload: str
    case: str
    load_average: float | None  # of the last minute, after the run; None if the OS does not report it
    profile: Profile


def profile(path: str | Path, workload: Workload, progress: Progress) -> list[CaseProfile]:
    """Profile the first request of every case of a workload, with the artifact as planned."""
    artifact = open_artifact(path)
    plan = artifact.plan
    target, encode, profiles = artifact.working_target(), encoder_of(artifact), []
    for index, case in enumerate(workload.cases):
        progress(index, len(workload.cases), f"{workload.name}: {case.name}, profiled")
        request = case.requests[0]
        tokens = tokens_of(request, encode)
        refused = context_error(len(tokens), request.output_tokens, plan.storage.capacity_tokens, None)
        if refused:
            raise Unsupported(f"--profile: {case.name}: {refused}")
        profiles.append(
            CaseProfile(
                artifact=Path(path).name,
                artifact_sha256=artifact.sha256,
                target=plan.target,
                backend=plan.backend,
                recipe=plan.recipe.name,
                workload=workload.name,
                case=case.name,
                profile=target.profile(plan, artifact.folder, tokens, request.output_tokens),
                load_average=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
            )
        )
    progress(1, 1, f"{workload.name}: profiled")
    return profiles
