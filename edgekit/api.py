"""`edgekit.plan`, `edgekit.quantize` and `edgekit.export`, which the commands of the same names call.

`edgekit.open` is `edgekit.runtime.open`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias, Unpack, overload

from edgekit.artifact.artifact import Artifact
from edgekit.artifact.export import export_all
from edgekit.artifact.weights_copy import copy_weights, refuse_existing
from edgekit.calibrating import CalibrationText, calibration_for
from edgekit.common.content_store import ContentStore
from edgekit.common.log import log
from edgekit.common.options import read_options
from edgekit.common.progress import Progress
from edgekit.contracts.device import DeviceProfile
from edgekit.contracts.neutral import NeutralWeights, is_neutral, weights_store
from edgekit.contracts.plan import Method, Plan
from edgekit.contracts.recipe import RECIPES, Recipe, with_budget
from edgekit.errors import InvalidInput
from edgekit.model.source import ModelSource, open_source
from edgekit.planner.make import make_plans, read_plan
from edgekit.planner.request import PlanOptions, PlanRequest, find_recipe
from edgekit.quant.calibration import LENGTH, SEQUENCES
from edgekit.quant.compute import Compute
from edgekit.quant.effort import Effort
from edgekit.quant.own_integers import recipe_of
from edgekit.quant.pipeline import need_torch, need_torch_for, neutral_weights, no_progress

__all__ = ["export", "plan", "quantize"]

Device: TypeAlias = str | Path | DeviceProfile
Devices: TypeAlias = list[str] | list[DeviceProfile] | tuple[Device, ...]


@overload
def plan(
    model: str | Path,
    device: Device = ...,
    *,
    draft: str | Path | None = ...,
    per_device: bool = ...,
    profiles: Sequence[str | Path] = ...,
    announce: Callable[[str], None] | None = ...,
    **options: Unpack[PlanOptions],
) -> Plan: ...


@overload
def plan(
    model: str | Path,
    device: Devices,
    *,
    draft: str | Path | None = ...,
    per_device: bool = ...,
    profiles: Sequence[str | Path] = ...,
    announce: Callable[[str], None] | None = ...,
    **options: Unpack[PlanOptions],
) -> list[Plan]: ...


def plan(
    model: str | Path,
    device: Device | Devices = "this",
    *,
    draft: str | Path | None = None,
    per_device: bool = False,
    profiles: Sequence[str | Path] = (),
    announce: Callable[[str], None] | None = None,
    **options: Unpack[PlanOptions],
) -> Plan | list[Plan]:
    """Decide how to build `model` for a device, without downloading or converting a weight.

    Args:
        model: a Hugging Face folder, a `.gguf` file, a hub id, `demo`, or neutral weights that `quantize` wrote.
        device: a device profile, its name or path, or `this`. A list gives a list of plans in the same order.
        draft: a draft model to run with the model; its memory is counted.
        per_device: choose a recipe for each device; otherwise all devices share the best recipe that fits all.
        profiles: folders of your own profiles.
        announce: called with a note before this machine's engines are timed, which happens once and takes seconds.
        options: requirements and preferences, the fields of `PlanRequest`: `context`, `max_memory`, `recipe`, …

    Raises `DoesNotFit`, with a table of the candidates, if none fits, and `InvalidInput` for an unknown option or a
    value out of bounds.

        >>> plan = edgekit.plan("demo", "raspberry-pi-5-8gb", context=1024, max_memory="1GiB")
        >>> print(plan.target, plan.recipe.name, plan.estimate.total_bytes)
    """
    devices = device if isinstance(device, list | tuple) else [device]
    request = read_options(PlanRequest, options)
    folders = [Path(folder) for folder in profiles]
    plans = make_plans(model, devices, request, draft=draft, per_device=per_device, profiles=folders, announce=announce)
    return list(plans) if isinstance(device, list | tuple) else plans[0]


def quantize(
    model: str | Path,
    recipe: str | Recipe | None,
    output: str | Path,
    *,
    calibrate: CalibrationText | None = None,
    method: Method | None = None,
    effort: Effort | None = None,
    compute: Compute | None = None,
    samples: int = SEQUENCES,
    sample_length: int = LENGTH,
    bits_per_weight: float | None = None,
    handover: bool = False,
    store: str | Path | None = None,
    threads: int | None = None,
    announce: Callable[[str], None] | None = None,
    progress: Progress = no_progress,
) -> NeutralWeights:
    """Quantise `model` once, into a folder of neutral weights that every target packs without rounding again.

    Args:
        model: a Hugging Face folder, a `.gguf` file, a hub id or `demo`.
        recipe: a name such as `s4-g32`, the path of a YAML file of rules, or a `Recipe`. None: `keep` if the source
            is quantised already (Q4_0, Q8_0, W4A16, GPTQ, MLX), which keeps its integers; otherwise `balanced`.
        output: the folder to write; it must not exist.
        calibrate: a file of text, jsonl or tokens, or `"default"` for the text that comes with edgekit.
        method: `rtn`, `gptq` or `awq`. None: `gptq` with calibration text, otherwise `rtn`.
        effort: `quick`, `normal` (calibrated) or `high` (scales tuned too). None: `normal` up to 0.6 B, else `quick`.
        compute: `cpu`, or the GPU of `cuda` or `mps`. None: a GPU that torch finds, else the processor.
        samples, sample_length: number of calibration sequences, and tokens in each.
        bits_per_weight: raise the most sensitive linears to 8 bits, up to this average over all weights.
        handover: keep embedding and head in float, for the loaders of servers.
        store: the folder that keeps neutral weights, instead of the user's cache.
        threads: number of torch threads, instead of one per core.
        announce: called with notes before long work, such as the expected duration of calibration.
        progress: called with the units done, their total and a description.

    Results of earlier calls are taken from the store, and an interrupted call continues where it stopped. Raises
    `InvalidInput`, `Unsupported`, `OutOfSpace`, or `TargetMissing` without torch.

        >>> weights = edgekit.quantize("demo", "s4-g32", "demo-s4", calibrate="default")
        >>> print(weights.recipe.name, weights.sha256)
    """
    path = Path(output)
    refuse_existing(path)
    source = open_source(model, need_weights=True)
    if is_neutral(source.folder):
        raise InvalidInput(f"{source.given}: holds neutral weights already; export it, or give the float model")
    need_torch_for(source)
    if threads is not None:
        need_torch()
        import torch

        torch.set_num_threads(threads)
    chosen = _recipe_for(source, recipe, bits_per_weight, handover)
    weights = neutral_weights(
        source,
        chosen,
        method=method,
        calibration=calibration_for(
            source,
            [chosen],
            calibrate=calibrate,
            method=method,
            effort=effort,
            compute=compute,
            samples=samples,
            sample_length=sample_length,
            store=_store(store),
            announce=announce,
        ),
        store=_store(store),
        progress=progress,
        compute=compute,
    )
    copy_weights(weights, path)
    return weights


@overload
def export(
    model_or_plan: str | Path | Plan,
    output: str | Path,
    device: Device = ...,
    *,
    calibrate: CalibrationText | None = ...,
    method: Method | None = ...,
    effort: Effort | None = ...,
    compute: Compute | None = ...,
    store: str | Path | None = ...,
    adapters: Mapping[str, str | Path] = ...,
    with_bom: bool = ...,
    prepare: bool = ...,
    announce: Callable[[str], None] | None = ...,
    progress: Progress = ...,
    **options: Unpack[PlanOptions],
) -> Artifact: ...


@overload
def export(
    model_or_plan: Sequence[Plan],
    output: str | Path,
    *,
    calibrate: CalibrationText | None = ...,
    method: Method | None = ...,
    effort: Effort | None = ...,
    compute: Compute | None = ...,
    store: str | Path | None = ...,
    announce: Callable[[str], None] | None = ...,
    progress: Progress = ...,
) -> list[Artifact]: ...


def export(
    model_or_plan: str | Path | Plan | Sequence[Plan],
    output: str | Path,
    device: Device | None = None,
    *,
    calibrate: CalibrationText | None = None,
    method: Method | None = None,
    effort: Effort | None = None,
    compute: Compute | None = None,
    store: str | Path | None = None,
    adapters: Mapping[str, str | Path] = MappingProxyType({}),
    with_bom: bool = False,
    prepare: bool = False,
    announce: Callable[[str], None] | None = None,
    progress: Progress = no_progress,
    **options: Unpack[PlanOptions],
) -> Artifact | list[Artifact]:
    """Build the artifact of a model or of a plan, check it against the float model, and seal it.

    Args:
        model_or_plan: a model as `plan` takes it, which is planned first; a `Plan`; the path of a file that
            `edgekit plan -o` wrote; or several plans, which share one quantisation.
        output: the artifact folder to write; it must not exist. With several plans, the parent of one per device.
        device, options: as in `plan`; only with a model, because a plan fixes them.
        calibrate, method, effort, compute, store, announce, progress: as in `quantize`.
        adapters: LoRA adapters (PEFT folders) to seal with the model, by name; needs the option `adapter_rank`.
        with_bom: add a bill of materials and a model card.
        prepare: open the artifact once, so that no later opening on this machine has to pack weights.

    Packages, disk space and the output path are checked before any work. An interrupted export leaves no artifact,
    and the next one continues at the layer where it stopped. Raises as `plan` and `quantize` do, and `TargetFailed` if
    the self-check fails.

        >>> artifact = edgekit.export("demo", "demo.edgekit", recipe="s4-g64")
        >>> with edgekit.open(artifact.folder) as runtime:
        ...     print(runtime.generate("def fibonacci(n):", max_tokens=32).text)
    """
    source, plans = _planned(model_or_plan, device, options)
    if prepare:
        refuse_other_devices(plans)
    made = export_all(
        plans,
        output,
        source=source,
        calibration=calibration_for(
            source,
            [each.recipe for each in plans],
            calibrate=calibrate,
            method=method,
            effort=effort,
            compute=compute,
            store=_store(store),
            announce=announce,
        ),
        method=method,
        compute=compute,
        store=_store(store),
        adapters={name: Path(folder) for name, folder in adapters.items()},
        with_bom=with_bom,
        announce=announce or log.warning,
        progress=progress,
    )
    if prepare:
        prepare_openings(made, progress)
    return made if _is_many(model_or_plan) else made[0]


def refuse_other_devices(plans: Sequence[Plan]) -> None:
    """Refuse to prepare for a machine that is not this one."""
    if others := [plan.device for plan in plans if plan.device != "this"]:
        raise InvalidInput(f"prepare: works for device this, not for {others[0]}; open the artifact there once")


def prepare_openings(artifacts: Sequence[Artifact], progress: Progress = no_progress) -> None:
    """Open each artifact once, so that its weights are packed for this machine."""
    from edgekit.runtime.open import open_runtime

    for number, artifact in enumerate(artifacts):
        progress(number, len(artifacts), "preparing for this machine")
        open_runtime(artifact.folder, prefixes=0).close()
        progress(number + 1, len(artifacts), "preparing for this machine")


def _is_many(given: str | Path | Plan | Sequence[Plan]) -> bool:
    return not isinstance(given, str | Path | Plan)


def _planned(
    given: str | Path | Plan | Sequence[Plan], device: Device | None, options: PlanOptions
) -> tuple[ModelSource, list[Plan]]:
    """Open the model and return it with its plans: the given ones, or new ones for `device`."""
    if isinstance(given, str | Path) and not str(given).endswith(".json"):
        source = open_source(given).with_own_integers()  # downloads them before they are planned
        request = read_options(PlanRequest, options)
        return source, list(make_plans(source, ["this" if device is None else device], request))
    named = [name for name, value in (("device", device), *options.items()) if value is not None]
    if named:
        raise InvalidInput(f"{', '.join(named)}: the plan has decided this; leave it out, or give a model")
    if isinstance(given, str | Path):
        plans = [read_plan(Path(given))]
    else:
        plans = [given] if isinstance(given, Plan) else list(given)
    return open_source(plans[0].model_source).with_own_integers(), plans


def _store(path: str | Path | None) -> ContentStore | None:
    return None if path is None else weights_store(Path(path))


def _recipe_for(source: ModelSource, given: str | Recipe | None, budget: float | None, is_handover: bool) -> Recipe:
    """Choose the recipe, apply the bits-per-weight budget, and adapt it to server loaders if `is_handover`."""
    from edgekit.quant.vllm_compat import handover, refuse_split

    recipe = recipe_of(source, find_recipe(given) if isinstance(given, str) else given) or RECIPES["balanced"]
    if recipe.keeps and (budget is not None or is_handover):
        option = "--handover" if is_handover else "--bits-per-weight"
        raise InvalidInput(f"{option}: {source.given} keeps its own integers ({recipe.keeps}); choose a --recipe too")
    if is_handover:
        recipe = handover(recipe)
        refuse_split(source.spec, recipe)
    return recipe if budget is None else with_budget(recipe, source.spec, budget)
