"""The arguments of vLLM 0.32: the YAML file of `vllm serve --config`, and keyword arguments of its engine."""

from __future__ import annotations

import json
from typing import Any

import yaml

from edgekit.apps.handover.server_plan import ServerPlan
from edgekit.apps.handover.servers.ranks import CHUNK_TOKENS
from edgekit.errors import Unsupported

VERSION = "vLLM 0.32"
PORTS = {"": 8000, "prefill": 8100, "decode": 8200}
DRAFT_TOKENS, HEAD_TOKENS = 4, 3
_NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def yaml_text(data: Any, comment: str) -> str:
    """Return `data` as YAML in its own order, under a comment of one line."""
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110)
    return f"# {comment}\n{text}"


def roles(plan: ServerPlan) -> tuple[str, ...]:
    """Return the roles of a plan that splits prefill and decode; otherwise a single unnamed role."""
    return ("prefill", "decode") if plan.layout.prefill else ("",)


def copies(plan: ServerPlan, role: str) -> int:
    """Return the number of copies of the model in a role."""
    return plan.layout.prefill if role == "prefill" else plan.layout.decoders


def engine_arguments(plan: ServerPlan, role: str = "", *, folder: str = ".", data: bool = True) -> dict[str, Any]:
    """Return the engine's keyword arguments. `folder` is the path of the bundle on the server.

    `data` False: the program that starts the engine makes the data-parallel copies.
    """
    layout = plan.layout
    arguments: dict[str, Any] = {
        "tensor_parallel_size": layout.tensor,
        "pipeline_parallel_size": layout.pipeline,
        "max_model_len": plan.context,
        "max_num_seqs": plan.sequences_each,
        "max_num_batched_tokens": max(CHUNK_TOKENS, plan.sequences_each),
        "gpu_memory_utilization": plan.memory_share,
    }
    if data and copies(plan, role) > 1:
        arguments["data_parallel_size"] = copies(plan, role)
    if layout.experts:
        arguments["enable_expert_parallel"] = True
    if plan.kv_format == "fp8":
        arguments["kv_cache_dtype"] = "fp8"
    if plan.adapters:
        arguments |= {"enable_lora": True, "max_loras": len(plan.adapters), "max_lora_rank": _lora_rank(plan)}
    if plan.draft is not None:
        arguments["speculative_config"] = {
            "method": "draft_model",
            "model": f"{folder}/draft",
            "num_speculative_tokens": DRAFT_TOKENS,
        }
    if plan.drafter is not None:
        arguments["speculative_config"] = {
            "method": "eagle3",
            "model": f"{folder}/drafter",
            "num_speculative_tokens": HEAD_TOKENS,
        }
    if role:
        arguments["kv_transfer_config"] = _NIXL
    return arguments


def serve_arguments(plan: ServerPlan, role: str = "", *, folder: str = ".", data: bool = True) -> dict[str, Any]:
    """Return the arguments of `vllm serve` by long name."""
    engine = engine_arguments(plan, role, folder=folder, data=data)
    named = {key.replace("_", "-"): _plain(value) for key, value in engine.items()}
    adapters = [f"{name}={folder}/adapters/{name}" for name in adapter_names(plan)]
    return named | ({"lora-modules": adapters} if adapters else {})


def files(plan: ServerPlan) -> dict[str, str]:
    """Return the YAML file of each role."""
    written = {}
    for role in roles(plan):
        head = {
            "model": "./weights",
            "served-model-name": plan.model.name,
            "host": "127.0.0.1",  # behind a proxy with keys
            "port": PORTS[role],
        }
        comment = f"{VERSION}: vllm serve --config {file_name(role)}, from this folder"
        written[file_name(role)] = yaml_text(head | serve_arguments(plan, role), comment)
    return written


def file_name(role: str) -> str:
    return f"vllm-{role}.yaml" if role else "vllm.yaml"


def command_line(arguments: dict[str, Any]) -> list[str]:
    """Return arguments as the words of a command."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is True:
            words.append(f"--{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *value]
        else:
            words += [f"--{name}", str(value)]
    return words


def adapter_names(plan: ServerPlan) -> list[str]:
    """Return the adapters' names on the server, which are their folders' names."""
    return [path.rstrip("/").rpartition("/")[2] for path in plan.adapters]


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict) else value


def _lora_rank(plan: ServerPlan) -> int:
    """Return the smallest maximum rank that vLLM accepts and every adapter fits."""
    rank = next((rank for rank in (8, 16, 32, 64, 128, 256, 320, 512) if rank >= plan.adapter_rank), None)
    if rank is None:
        raise Unsupported(f"--adapter: rank {plan.adapter_rank}, and {VERSION} has room for 512")
    return rank
