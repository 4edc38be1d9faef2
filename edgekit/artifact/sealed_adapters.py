"""Seals LoRA adapters with a model, one folder each, so that an update with a new adapter fetches only its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgekit.contracts.plan import Plan
from edgekit.errors import UnknownName, Unsupported
from edgekit.model.lora import check_adapter_name, copy_adapter, read_adapter

ADAPTERS_FOLDER = "adapters"


def check_adapters(plan: Plan, adapters: Mapping[str, Path]) -> None:
    """Refuse adapters that this plan's artifact could not load."""
    for name, folder in adapters.items():
        check_adapter_name(name)
        read_adapter(folder, plan.model, most_rank=plan.adapter_rank)


def check_inputs(plan: Plan) -> None:
    """Refuse room for adapters in an artifact whose weights none fits."""
    if plan.adapter_rank and (by := plan.rescaled_by):
        raise Unsupported(
            f"--adapter-rank {plan.adapter_rank}: {by} scaled the inputs that adapters read; use recipe "
            f"{plan.recipe.plain_name} and --method gptq or rtn, or leave out --adapter-rank"
        )


def seal_adapters(adapters: Mapping[str, Path], staging: Path) -> None:
    """Copy adapters into `staging`, the artifact's folder before it is sealed."""
    for name, folder in adapters.items():
        copy_adapter(folder, staging / ADAPTERS_FOLDER / name)


def sealed_adapter(artifact: Path, name: str) -> Path:
    """Return the folder of adapter `name` in the artifact. Raises `UnknownName`."""
    check_adapter_name(name)
    folder = artifact / ADAPTERS_FOLDER
    if not (folder / name).is_dir():
        raise UnknownName("adapter", name, sorted(path.name for path in folder.glob("*")))
    return folder / name
