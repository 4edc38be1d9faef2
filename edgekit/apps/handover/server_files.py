"""The files of a bundle that start a server, and its README: the templates in `templates`, with their blanks filled."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from shlex import join
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from edgekit.apps.handover.ranks import CHUNK_TOKENS
from edgekit.apps.handover.server_plan import ServerName, ServerPlan
from edgekit.common.units import show_bytes
from edgekit.errors import Unsupported

VERSIONS: dict[ServerName, str] = {
    "vllm": "vLLM 0.32",
    "sglang": "SGLang 0.5.23",
    "ray": "Ray 2.60",
    "kserve": "KServe 0.20, serving.kserve.io/v1alpha2",
}
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the maximum ranks that vLLM accepts


def server_files(plan: ServerPlan) -> dict[str, str]:
    """Return the text of each file, keyed by name; vLLM and SGLang have one for each role."""
    if plan.server == "ray" and plan.adapters:
        raise Unsupported("--to ray: Ray Serve loads adapters from a bucket, not from a folder; use --to vllm")
    if plan.server in ("ray", "kserve"):
        template = "ray-serve.yaml" if plan.server == "ray" else "kserve.yaml"
        return {template: _yaml_file(template, plan)}
    template = f"{plan.server}.yaml"
    return {
        name: _yaml_file(template, plan, role, file=name) for role in roles_of(plan) for name in (_file(plan, role),)
    }


def readme(plan: ServerPlan, files: list[str]) -> str:
    """Return the README in Markdown: contents, commands, limits and the smoke test."""
    return _rendered("README.md", plan, files=files)


def adapter_names(plan: ServerPlan) -> list[str]:
    """Return the adapters' names on the server, which are their folders' names."""
    return [path.rstrip("/").rpartition("/")[2] for path in plan.adapters]


def roles_of(plan: ServerPlan) -> tuple[str, ...]:
    """Return the roles of a plan that splits prefill and decode; otherwise a single unnamed role."""
    return ("prefill", "decode") if plan.layout.prefill else ("",)


def copies_of(plan: ServerPlan, role: str) -> int:
    """Return the number of copies of the model in a role."""
    return plan.layout.prefill if role == "prefill" else plan.layout.decoders


def engine_arguments(plan: ServerPlan, role: str = "", *, folder: str = ".", data: bool = True) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's engine. `folder` is the path of the bundle on the server.

    `data` False: the program that starts the engine makes the data-parallel copies.
    """
    arguments: dict[str, Any] = yaml.safe_load(_rendered("vllm_engine.yaml", plan, role, folder=folder, data=data))
    return arguments


def vllm_arguments(plan: ServerPlan, role: str = "", *, folder: str = ".", data: bool = True) -> dict[str, Any]:
    """Return the arguments of `vllm serve` by long name."""
    engine = engine_arguments(plan, role, folder=folder, data=data)
    named = {
        name.replace("_", "-"): json.dumps(value) if isinstance(value, dict) else value
        for name, value in engine.items()
    }
    adapters = [f"{name}={folder}/adapters/{name}" for name in adapter_names(plan)]
    return named | ({"lora-modules": adapters} if adapters else {})


def command_line(arguments: dict[str, Any]) -> str:
    """Return arguments as the words of a command."""
    words: list[str] = []
    for name, value in arguments.items():
        values = value if isinstance(value, list) else [] if value is True else [str(value)]
        words += [f"--{name}", *values]
    return join(words)


def sglang_command(plan: ServerPlan, role: str) -> str:
    """Return the command that starts a role. It names the paths of adapters, which the YAML file may not."""
    start = f"python -m sglang.launch_server --config {_file(plan, role)}"
    paths = join(f"{name}=./adapters/{name}" for name in adapter_names(plan))
    return f"{start} --lora-paths {paths}" if paths else start


def kubernetes_name(plan: ServerPlan) -> str:
    """Return the model's name in the characters that Kubernetes allows."""
    name = re.sub(r"[^a-z0-9]+", "-", plan.model.name.lower()).strip("-")[:50].strip("-")
    return name if name[:1].isalpha() else f"model-{name}".rstrip("-")


@cache
def _templates() -> Environment:
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    made = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    made.filters |= {"bytes": show_bytes, "yaml": _in_one_line}
    used = (command_line, copies_of, engine_arguments, kubernetes_name, roles_of, sglang_command, vllm_arguments)
    made.globals |= {function.__name__: function for function in used}
    return made


def _rendered(template: str, plan: ServerPlan, role: str = "", **blanks: Any) -> str:
    return (
        _templates()
        .get_template(f"{template}.jinja")
        .render(
            plan=plan,
            layout=plan.layout,
            role=role,
            copies=copies_of(plan, role),
            version=VERSIONS[plan.server],
            chunk_tokens=CHUNK_TOKENS,
            lora_rank=_lora_rank(plan),
            **blanks,
        )
    )


def _yaml_file(template: str, plan: ServerPlan, role: str = "", **blanks: Any) -> str:
    """Return a filled template as YAML in its own order, under its first line, which is a comment."""
    comment, _, body = _rendered(template, plan, role, **blanks).partition("\n")
    return f"{comment}\n{yaml.safe_dump(yaml.safe_load(body), sort_keys=False, allow_unicode=True, width=110)}"


def _in_one_line(value: Any) -> str:
    """Return a value as YAML that may stand behind a key: every scalar is quoted, whatever its characters."""
    text: str = yaml.safe_dump(value, default_style='"', default_flow_style=True, sort_keys=False, width=math.inf)
    return text.strip()


def _file(plan: ServerPlan, role: str) -> str:
    return f"{plan.server}-{role}.yaml" if role else f"{plan.server}.yaml"


def _lora_rank(plan: ServerPlan) -> int:
    """Return the smallest maximum rank that vLLM accepts and every adapter fits."""
    rank = next((rank for rank in _LORA_RANKS if rank >= plan.adapter_rank), None)
    if rank is None and plan.server != "sglang":
        raise Unsupported(f"--adapter: rank {plan.adapter_rank}, and {VERSIONS['vllm']} has room for {_LORA_RANKS[-1]}")
    return rank or plan.adapter_rank
