"""KServe's resource `LLMInferenceService` v1alpha2 (0.20), which starts vLLM on Kubernetes."""

from __future__ import annotations

import re
from shlex import join
from typing import Any

from edgekit.apps.handover import vllm
from edgekit.apps.handover.server_plan import ServerPlan

CLAIM = "models"  # the persistent volume claim to which the bundle is copied
VERSION = "KServe 0.20, serving.kserve.io/v1alpha2"


def service(plan: ServerPlan) -> dict[str, Any]:
    """Return the resource."""
    name = kubernetes_name(plan)
    role = "decode" if plan.layout.prefill else ""
    spec: dict[str, Any] = {
        "model": {"uri": f"pvc://models/{name}/weights", "name": plan.model.name},
        "router": {"gateway": {}, "route": {}, "scheduler": {}},
        **_workload(plan, role),
    }
    if plan.layout.prefill:
        spec["prefill"] = _workload(plan, "prefill")
    return {
        "apiVersion": "serving.kserve.io/v1alpha2",
        "kind": "LLMInferenceService",
        "metadata": {"name": name},
        "spec": spec,
    }


def _workload(plan: ServerPlan, role: str) -> dict[str, Any]:
    """Return replicas, parallelism and the container of one role."""
    layout, copies = plan.layout, vllm.copies(plan, role)
    share = layout.experts and not role  # copies that share experts are ranks of one replica
    parallelism = {"tensor": layout.tensor, "pipeline": layout.pipeline}
    if share:
        parallelism |= {"data": copies, "dataLocal": copies, "expert": True}
    arguments = vllm.serve_arguments(plan, role, folder="/mnt/bundle", data=share)
    container: dict[str, Any] = {
        "name": "main",
        "env": [{"name": "VLLM_ADDITIONAL_ARGS", "value": join(vllm.command_line(arguments))}],
        "resources": gpu_resources(plan, layout.tensor * layout.pipeline * (copies if share else 1)),
    }
    template: dict[str, Any] = {"containers": [container]}
    if plan.adapters or plan.draft or plan.drafter:
        container["volumeMounts"] = [
            {"name": "bundle", "mountPath": "/mnt/bundle", "subPath": kubernetes_name(plan), "readOnly": True}
        ]
        template["volumes"] = [{"name": "bundle", "persistentVolumeClaim": {"claimName": CLAIM, "readOnly": True}}]
    return {
        "replicas": 1 if share else copies,
        "parallelism": {
            key: value for key, value in parallelism.items() if value is True or value > 1 or key == "tensor"
        },
        "template": template,
    }


def kubernetes_name(plan: ServerPlan) -> str:
    """Return the model's name in the characters that Kubernetes allows."""
    name = re.sub(r"[^a-z0-9]+", "-", plan.model.name.lower()).strip("-")[:50].strip("-")
    return name if name[:1].isalpha() else f"model-{name}".rstrip("-")


def gpu_resources(plan: ServerPlan, count: int) -> dict[str, Any]:
    """Return the requests and limits of `count` GPUs."""
    kind = "amd.com/gpu" if plan.gpu.startswith("mi") else "nvidia.com/gpu"
    return {"limits": {kind: str(count)}, "requests": {kind: str(count)}}


def files(plan: ServerPlan) -> dict[str, str]:
    """Return the file of the resource."""
    return {"kserve.yaml": vllm.yaml_text(service(plan), f"{VERSION}: kubectl apply -f kserve.yaml")}
