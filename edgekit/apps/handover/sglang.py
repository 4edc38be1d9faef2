"""The YAML file of `python -m sglang.launch_server --config` for SGLang 0.5."""

from __future__ import annotations

from shlex import join
from typing import Any

from edgekit.apps.handover.server_plan import ServerPlan
from edgekit.apps.handover.servers.ranks import CHUNK_TOKENS
from edgekit.apps.handover.vllm import DRAFT_TOKENS, PORTS, adapter_names, copies, roles, yaml_text

VERSION = "SGLang 0.5.23"


def arguments(plan: ServerPlan, role: str = "") -> dict[str, Any]:
    """Return the launch arguments by long name."""
    layout, data = plan.layout, copies(plan, role)
    given: dict[str, Any] = {
        "model-path": "./weights",
        "served-model-name": plan.model.name,
        "host": "127.0.0.1",
        "port": 30000 + PORTS[role] - 8000,
        "tp-size": layout.tensor,
        "pp-size": layout.pipeline,
        "context-length": plan.context,
        "max-running-requests": plan.sequences_each * data,
        "chunked-prefill-size": CHUNK_TOKENS,
        "mem-fraction-static": plan.memory_share,
    }
    if layout.experts:
        # Expert parallelism spans all GPUs of the server; attention's data-parallel copies are inside that group.
        given |= {"tp-size": layout.expert_group, "ep-size": layout.expert_group}
        if data > 1 and not role:
            given["attn-dp-size"] = data
    elif data > 1:
        given["dp-size"] = data
    if plan.kv_format == "fp8":
        given["kv-cache-dtype"] = "fp8_e4m3"
    if plan.adapters:
        given |= {"enable-lora": True, "max-lora-rank": plan.adapter_rank}  # `command` names their paths
    if plan.draft is not None:
        given |= {
            "speculative-algorithm": "STANDALONE",
            "speculative-draft-model-path": "./draft",
            "speculative-num-steps": DRAFT_TOKENS,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": DRAFT_TOKENS + 1,
        }
    if role:
        given |= {"disaggregation-mode": role, "disaggregation-transfer-backend": "nixl"}
    return given


def files(plan: ServerPlan) -> dict[str, str]:
    """Return the YAML file of each role."""
    return {
        file_name(role): yaml_text(
            arguments(plan, role),
            f"{VERSION}: {command(plan, role)}, from this folder",
        )
        for role in roles(plan)
    }


def command(plan: ServerPlan, role: str) -> str:
    """Return the command that starts a role. Its paths of adapters are refused in the YAML file."""
    start = f"python -m sglang.launch_server --config {file_name(role)}"
    paths = join(f"{name}=./adapters/{name}" for name in adapter_names(plan))
    return f"{start} --lora-paths {paths}" if paths else start


def file_name(role: str) -> str:
    return f"sglang-{role}.yaml" if role else "sglang.yaml"
