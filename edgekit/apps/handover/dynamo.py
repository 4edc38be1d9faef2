"""NVIDIA Dynamo's resource `DynamoGraphDeployment` v1alpha1 (1.6), which starts vLLM on Kubernetes."""

from __future__ import annotations

from typing import Any

from edgekit.apps.handover import vllm
from edgekit.apps.handover.kubernetes import CLAIM, kubernetes_name, volume
from edgekit.apps.handover.server_plan import ServerPlan
from edgekit.apps.handover.yaml_text import yaml_text
from edgekit.errors import Unsupported

VERSION = "Dynamo 1.6.1, nvidia.com/v1alpha1"
_FRONTEND = "nvcr.io/nvidia/ai-dynamo/dynamo-frontend:1.6.1"
_WORKER = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.6.1"


def graph(plan: ServerPlan) -> dict[str, Any]:
    """Return the resource: a front end and one worker per role."""
    if plan.gpu.startswith("mi"):
        raise Unsupported(f"--to dynamo: its images are for NVIDIA's GPUs, not for {plan.gpu}; use --to vllm")
    services: dict[str, Any] = {
        "Frontend": {
            "componentType": "frontend",
            "replicas": 1,
            "extraPodSpec": {
                "mainContainer": {
                    "image": _FRONTEND,
                    "command": ["python3", "-m", "dynamo.frontend"],
                    "args": ["--http-port", "8000"],
                }
            },
        }
    }
    for role in vllm.roles(plan):
        services[role or "worker"] = _worker(plan, role)
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": kubernetes_name(plan)},
        "spec": {"backendFramework": "vllm", "services": services},
    }


def _worker(plan: ServerPlan, role: str) -> dict[str, Any]:
    layout, copies = plan.layout, vllm.copies(plan, role)
    share = layout.experts and not role  # copies that share experts are ranks of one worker
    gpus = layout.tensor * layout.pipeline * (copies if share else 1)
    folder = f"/{CLAIM}/{kubernetes_name(plan)}"
    arguments = vllm.serve_arguments(plan, role, folder=folder, data=share)
    model = {"model": f"{folder}/weights", "served-model-name": plan.model.name}
    words = vllm.command_line(model | arguments) + (["--disaggregation-mode", role] if role else [])
    worker: dict[str, Any] = {
        "componentType": "worker",
        "replicas": 1 if share else copies,
        "resources": {"requests": {"gpu": str(gpus)}, "limits": {"gpu": str(gpus)}},
        "extraPodSpec": {
            "volumes": [volume(CLAIM)],
            "mainContainer": {
                "image": _WORKER,
                "command": ["python3", "-m", "dynamo.vllm"],
                "args": words,
                "volumeMounts": [{"name": CLAIM, "mountPath": f"/{CLAIM}", "readOnly": True}],
            },
        },
    }
    return worker | ({"subComponentType": role} if role else {})


def files(plan: ServerPlan) -> dict[str, str]:
    """Return the file of the resource."""
    return {"dynamo.yaml": yaml_text(graph(plan), f"{VERSION}: kubectl apply -f dynamo.yaml")}
