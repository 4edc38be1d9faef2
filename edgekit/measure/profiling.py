"""Where the time of a request goes, operator by operator, for targets whose vendor tells. Knows no vendor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

from edgekit import plugins
from edgekit.artifact import open_artifact
from edgekit.errors import TargetMissing, Unsupported
from edgekit.frozen import Frozen
from edgekit.interfaces import CanProfile, Profile, Progress
from edgekit.measure.arms import needs
from edgekit.measure.prompts import tokens_of
from edgekit.measure.workload import Workload
from edgekit.runtime.text import read_codec


class Profiled(Frozen):
    """One case of a workload on one artifact."""

    artifact: str
    artifact_sha256: str
    target: str
    backend: str
    recipe: str
    workload: str
    case: str
    load_average: float | None  # of the last minute, when it was over; None where the machine does not tell
    profile: Profile


def profile(path: str | Path, workload: Workload, progress: Progress) -> list[Profiled]:
    """Every case of a workload under the vendor's clock: the first request of each, as planned."""
    artifact = open_artifact(path)
    plan = artifact.plan
    target = plugins.load_target(plan.target)
    if getattr(target, "profile", None) is None:
        raise Unsupported(f"--profile: the {plan.target} target cannot tell the time of its operators; leave it away")
    missing = target.missing()
    if missing:
        raise TargetMissing(missing)
    codec, found = read_codec(artifact.folder), []
    for index, case in enumerate(workload.cases):
        progress(index, len(workload.cases), f"{workload.name}: {case.name}, under the clock")
        request = case.requests[0]
        tokens = tokens_of(request, lambda text, begins: codec.encode(text, add_special_tokens=begins))
        refused = needs(len(tokens), request.output_tokens, plan.storage.capacity_tokens, None)
        if refused:
            raise Unsupported(f"--profile: {case.name}: {refused}")
        found.append(
            Profiled(
                artifact=Path(path).name,
                artifact_sha256=artifact.sha256,
                target=plan.target,
                backend=plan.backend,
                recipe=plan.recipe.name,
                workload=workload.name,
                case=case.name,
                profile=cast(CanProfile, target).profile(plan, artifact.folder, tokens, request.output_tokens),
                load_average=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
            )
        )
    progress(1, 1, f"{workload.name}: profiled")
    return found
