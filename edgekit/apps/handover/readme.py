"""The README of a bundle: contents, commands, limits and the smoke test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgekit.apps.handover import kserve, ray_serve, sglang, vllm
from edgekit.apps.handover.server_plan import ServerName, ServerPlan
from edgekit.common.units import show_bytes

_NIXL_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"


def readme(plan: ServerPlan, files: Sequence[str]) -> str:
    """Return the README in Markdown."""
    memory, speed = plan.memory, plan.speed
    version, commands = _COMMANDS[plan.server](plan)
    classes = "\n".join(f"| {name} | {show_bytes(size)} |" for name, size in memory.classes if size)
    notes = "".join(f"- {note}\n" for note in plan.notes)
    return f"""# {plan.model.name} for {plan.server}

{plan.recipe.name}, {plan.layout} on {plan.gpu} × {plan.layout.gpus}. Written for {version}.

- `weights/`: integers and scales in compressed-tensors form, with config, tokenizer and chat template
- {", ".join(f"`{name}`" for name in files)}: how the server is started
- `smoke_test.py`, `reference.json`: asks the running server for 16 tokens and compares them with edgekit's
- `plan.json`: this plan and every layout that was not taken, with the number that failed

## Start

{commands}
## Check

    python smoke_test.py --url {_URLS[plan.server]}

## What was planned

Every figure is a prediction; none was measured on these GPUs.

| on each GPU | |
|---|---|
{classes}
| together | {show_bytes(memory.total_bytes)} of {show_bytes(plan.budget_bytes)} |

{plan.sequences} requests at once, {plan.context:,} tokens each: {speed.tokens_per_s_each:g} tokens a second each,
{speed.tokens_per_s_all:g} together, the first token after {speed.first_token_s:g} s ({speed.basis}).
One copy holds {plan.kv_tokens:,} tokens of KV.
{notes}"""


def _vllm(plan: ServerPlan) -> tuple[str, str]:
    if not plan.layout.prefill:
        return vllm.VERSION, "    vllm serve --config vllm.yaml\n"
    lines = [
        f"    {_NIXL_PORT}={5600 + 100 * index} vllm serve --config {vllm.file_name(role)}   # on its own"
        f" {plan.layout.tensor * plan.layout.pipeline * vllm.copies(plan, role)} GPUs"
        for index, role in enumerate(vllm.roles(plan))
    ]
    ports = f"{vllm.PORTS['prefill']} and {vllm.PORTS['decode']}"
    travels = f"{show_bytes(plan.transfer_bytes or 0)} of KV travel for a prompt of {plan.context // 2:,} tokens"
    then = (
        f"\nA proxy joins the two (ports {ports}): vLLM's `disagg_proxy_demo.py`, vllm-router or llm-d.\n{travels}.\n"
    )
    return vllm.VERSION, "\n".join(lines) + "\n" + then


def _sglang(plan: ServerPlan) -> tuple[str, str]:
    lines = [f"    {sglang.command(plan, role)}" for role in vllm.roles(plan)]
    router = "\nSGLang's router (`sglang_router`) joins prefill and decode.\n" if plan.layout.prefill else ""
    return sglang.VERSION, "\n".join(lines) + "\n" + router


def _ray(plan: ServerPlan) -> tuple[str, str]:
    return ray_serve.VERSION, "    pip install 'ray[serve,llm]'\n    serve run ray-serve.yaml\n"


def _kserve(plan: ServerPlan) -> tuple[str, str]:
    start = (
        f"Copy this folder to the persistent volume claim `{kserve.CLAIM}`, as `{kserve.kubernetes_name(plan)}/`. Then:"
    )
    return kserve.VERSION, f"{start}\n\n    kubectl apply -f kserve.yaml\n"


_COMMANDS: dict[ServerName, Callable[[ServerPlan], tuple[str, str]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "ray": _ray,
    "kserve": _kserve,
}
_URLS: dict[ServerName, str] = {
    "vllm": "http://127.0.0.1:8000",
    "sglang": "http://127.0.0.1:30000",
    "ray": "http://127.0.0.1:8000",
    "kserve": "http://GATEWAY",
}
