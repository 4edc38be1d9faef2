"""The YAML file of `serve run` for Ray Serve LLM 2.60, which starts vLLM on a Ray cluster."""

from __future__ import annotations

from typing import Any

from edgekit.apps.handover import vllm
from edgekit.apps.handover.server_plan import ServerPlan
from edgekit.errors import Unsupported

VERSION = "Ray 2.60"
_ACCELERATORS = {
    "a100-40gb": "A100-40G",
    "a100-80gb": "A100-80G",
    "mi300x": "AMD-Instinct-MI300X-OAM",
}  # Ray's names; the others are ours in capitals. It has none for the A10


def application(plan: ServerPlan) -> dict[str, Any]:
    """Return the application: one deployment, or one for prefill and one for decode."""
    if plan.adapters:
        raise Unsupported("--to ray: Ray Serve loads adapters from a bucket, not from a folder; use --to vllm")
    if plan.layout.prefill:
        builder = "build_pd_openai_app"
        arguments: dict[str, Any] = {f"{role}_config": _llm_config(plan, role) for role in ("prefill", "decode")}
    elif plan.layout.experts and plan.layout.data > 1:
        builder, arguments = "build_dp_openai_app", {"llm_config": _llm_config(plan, "")}
    else:
        builder, arguments = "build_openai_app", {"llm_configs": [_llm_config(plan, "")]}
    return {
        "applications": [
            {
                "name": "llm",
                "route_prefix": "/",
                "import_path": f"ray.serve.llm:{builder}",
                "args": arguments,
            }
        ]
    }


def _llm_config(plan: ServerPlan, role: str) -> dict[str, Any]:
    share = plan.layout.experts and not role  # copies that share experts are ranks of one engine
    copies = vllm.copies(plan, role)
    config: dict[str, Any] = {
        "model_loading_config": {"model_id": plan.model.name, "model_source": "./weights"},
        "engine_kwargs": vllm.engine_arguments(plan, role, data=share),
    }
    if plan.gpu != "a10":
        config["accelerator_type"] = _ACCELERATORS.get(plan.gpu, plan.gpu.upper())
    if not share:
        config["deployment_config"] = {
            "autoscaling_config": {
                "min_replicas": copies,
                "max_replicas": copies,
                "target_ongoing_requests": plan.sequences_each,
            },
            "max_ongoing_requests": plan.sequences_each,
        }
    return config


def files(plan: ServerPlan) -> dict[str, str]:
    """Return the file of the application."""
    return {
        "ray-serve.yaml": vllm.yaml_text(application(plan), f"{VERSION}: serve run ray-serve.yaml, from this folder")
    }
