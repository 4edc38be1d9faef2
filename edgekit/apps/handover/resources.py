"""What files of several servers share: YAML text, and names, GPUs and volume claims of Kubernetes."""

from __future__ import annotations

import re
from typing import Any

import yaml

from edgekit.apps.handover.server_plan import ServerPlan

CLAIM = "models"  # the persistent volume claim to which the bundle is copied


def yaml_text(data: Any, comment: str) -> str:
    """Return `data` as YAML in its own order, under a comment of one line."""
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110)
    return f"# {comment}\n{text}"


def kubernetes_name(plan: ServerPlan) -> str:
    """Return the model's name in the characters that Kubernetes allows."""
    name = re.sub(r"[^a-z0-9]+", "-", plan.model.name.lower()).strip("-")[:50].strip("-")
    return name if name[:1].isalpha() else f"model-{name}".rstrip("-")


def gpu_resources(plan: ServerPlan, count: int) -> dict[str, Any]:
    """Return the requests and limits of `count` GPUs."""
    kind = "amd.com/gpu" if plan.gpu.startswith("mi") else "nvidia.com/gpu"
    return {"limits": {kind: str(count)}, "requests": {kind: str(count)}}
