"""`edgekit.plan`, `edgekit.quantize` and `edgekit.export`, which the commands of the same names call.

`edgekit.open` is `edgekit.runtime.open`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias, overload

from pydantic import Field

from edgekit.artifact.artifact import Artifact
from edgekit.artifact.export import ExportOptions, check_export, export as build_one, places_for
from edgekit.calibrating import calibration_for
from edgekit.common.options import one_of, read_options
from edgekit.common.progress import Progress
from edgekit.common.staging import refuse_existing
from edgekit.contracts.device import DeviceProfile
from edgekit.contracts.neutral import NeutralWeights, is_neutral
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import RECIPES, SMALL, Recipe, of_model
from edgekit.errors import EdgekitError, InvalidInput
from edgekit.model.source import ModelSource, open_source
from edgekit.planner.make import budgeted, make_plans, read_plan
from edgekit.planner.request import PlanRequest, find_recipe
from edgekit.quant.options import QuantOptions
from edgekit.quant.own_integers import recipe_of
from edgekit.quant.pipeline import need_torch, neutral_weights

__all__ = ["export", "plan", "quantize"]

Device: TypeAlias = str | Path | DeviceProfile
Devices: TypeAlias = list[str] | list[DeviceProfile] | tuple[Device, ...]


@overload
def plan(
    model: str | Path,
    device: Device = ...,
    *,
    draft: str | Path | None = ...,
    profiles: Sequence[str | Path] = ...,
    announce: Callable[[str], None] | None = ...,
    **options: Any,
) -> Plan: ...


@overload
def plan(
    model: str | Path,
    device: Devices,
    *,
    draft: str | Path | None = ...,
    profiles: Sequence[str | Path] = ...,
    announce: Callable[[str], None] | None = ...,
    **options: Any,
) -> list[Plan]: ...


def plan(
    model: str | Path,
    device: Device | Devices = "this",
    *,
    draft: str | Path | None = None,
    profiles: Sequence[str | Path] = (),
    announce: Callable[[str], None] | None = None,
    **options: Any,
) -> Plan | list[Plan]:
    """Decide how to build `model` for a device, without downloading or converting a weight.

    Args:
        model: a Hugging Face folder, a `.gguf` file, a hub id, `demo`, or neutral weights that `quantize` wrote.
        device: a device profile, its name or path, or `this`. A list gives a list of plans
            in the same order, which share the best recipe that fits all.
        draft: a draft model to run with the model; its memory is counted.
        profiles: folders of your own profiles.
        announce: called with a note before this machine's engines are timed, which happens once and takes seconds.
        options: requirements and preferences, the fields of `PlanRequest`: `context`, `memory`, `recipe`, …

    Raises `DoesNotFit`, with a table of the candidates, if none fits, and `InvalidInput` for an unknown option or a
    value out of bounds.

        >>> plan = edgekit.plan("demo", "raspberry-pi-5-8gb", context=1024, memory="1GiB")
        >>> print(plan.target, plan.recipe.name, plan.estimate.total_bytes)
    """
    devices = device if isinstance(device, list | tuple) else [device]
    request = read_options(PlanRequest, options)
    folders = [Path(folder) for folder in profiles]
    plans = make_plans(model, devices, request, draft=draft, profiles=folders, announce=announce)
    return list(plans) if isinstance(device, list | tuple) else plans[0]


class QuantizeOptions(QuantOptions):
    """The options of `quantize`: how integers are chosen, and with how many threads."""

    bits_per_weight: float | None = Field(
        default=None, description="Raise the most sensitive matrices to 8 bits, up to this average over all weights."
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="Number of threads, instead of one per core."
    )


def quantize(
    model: str | Path,
    recipe: str | Recipe | None,
    output: str | Path,
    options: QuantizeOptions | None = None,
    **given: Any,
) -> NeutralWeights:
    """Quantise `model` once, into a folder of neutral weights that every target packs without rounding again.

    Args:
        model: a Hugging Face folder, a `.gguf` file, a hub id or `demo`.
        recipe: a name such as `s4-g32`, the path of a YAML file of rules, or a `Recipe`. None: `keep` if the source
            is quantised already (Q4_K, Q4_1, W4A16, GPTQ, AWQ, MLX), which keeps its integers; otherwise
            `s8` where integers are rounded (`effort="quick"`, or nothing to calibrate with), else `balanced`.
        output: the folder to write; it must not exist.
        options, given: `QuantizeOptions`, as one object or by keyword: `calibrate`, `effort`, `report`, …

    Results of earlier calls are taken from the store, and an interrupted call continues where it stopped. Raises
    `InvalidInput`, `Unsupported`, `OutOfSpace`, or `TargetMissing` without torch.

        >>> weights = edgekit.quantize("demo", "s4-g32", "demo-s4", calibrate="default")
        >>> print(weights.recipe.name, weights.sha256)
    """
    options = one_of(options, QuantizeOptions, given)
    path = Path(output)
    refuse_existing(path)
    source = open_source(model, need_weights=True)
    if is_neutral(source.folder):
        raise InvalidInput(f"{source.given}: holds neutral weights already; export it, or give the float model")
    if options.threads is not None:
        need_torch()
        import torch

        torch.set_num_threads(options.threads)
    chosen = _recipe_for(source, recipe, options)
    weights = neutral_weights(
        source,
        chosen,
        method=options.method,
        calibration=calibration_for(source, [chosen], options),
        store=options.weights,
        progress=options.report.progress,
        compute=options.compute,
    )
    weights.copy_to(path)
    return weights


@overload
def export(
    model_or_plan: str | Path | Plan,
    output: str | Path,
    device: Device | None = ...,
    options: ExportOptions | None = ...,
    **given: Any,
) -> Artifact: ...


@overload
def export(
    model_or_plan: Sequence[Plan],
    output: str | Path,
    device: None = ...,
    options: ExportOptions | None = ...,
    **given: Any,
) -> list[Artifact]: ...


def export(
    model_or_plan: str | Path | Plan | Sequence[Plan],
    output: str | Path,
    device: Device | None = None,
    options: ExportOptions | None = None,
    **given: Any,
) -> Artifact | list[Artifact]:
    """Build the artifact of a model or of a plan, check it against the float model, and seal it.

    Args:
        model_or_plan: a model as `plan` takes it, which is planned first; a `Plan`; the path of a file that
            `edgekit plan -o` wrote; or several plans, which share one quantisation.
        output: the artifact folder to write; it must not exist. With several plans, the parent of one per device.
        device: as in `plan`; only with a model, because a plan fixes it.
        options, given: `ExportOptions`, as one object or by keyword: `calibrate`, `effort`, `adapters`, `report`, …;
            with a model, also what `plan` takes: `context`, `recipe`, …

    Packages, disk space and the output path are checked before any work. An interrupted export leaves no artifact,
    and the next one continues at the layer where it stopped. Raises as `plan` and `quantize` do, and `TargetFailed` if
    the self-check fails.

        >>> artifact = edgekit.export("demo", "demo.edgekit", recipe="s4-g64")
        >>> with edgekit.open(artifact.folder) as runtime:
        ...     print(runtime.generate("def fibonacci(n):", max_tokens=32).text)
    """
    asked = {name: value for name, value in given.items() if name not in ExportOptions.model_fields}
    built = {name: value for name, value in given.items() if name not in asked}
    options = one_of(options, ExportOptions, built)
    source, plans = _planned(model_or_plan, device, asked, options)
    made, refused = build(source, list(zip(plans, places_for(plans, output), strict=True)), options)
    if refused:
        raise next(iter(refused.values()))
    return made if isinstance(model_or_plan, Sequence) and not isinstance(model_or_plan, str) else made[0]


def build(
    source: ModelSource, jobs: Sequence[tuple[Plan, Path]], options: ExportOptions, *, partly: bool = False
) -> tuple[list[Artifact], dict[str, EdgekitError]]:
    """Build an artifact for each plan at its path, with one calibration; every plan is checked before the first.

    If `partly`, plans that cannot be built are left out while another one can, and their errors returned by device.
    """
    if others := [plan.device for plan, _ in jobs if options.prepare and plan.device != "this"]:
        raise InvalidInput(f"prepare: works for device this, not for {others[0]}; open the artifact there once")
    made, ready, refused = list[Artifact](), [], dict[str, EdgekitError]()

    def leave_out(plan: Plan, error: EdgekitError) -> None:
        if not partly or len(jobs) == 1:
            raise error
        refused[plan.device] = error
        options.report.warn(f"{plan.device} cannot be built: {error}")
        if len(refused) == len(jobs):
            raise next(iter(refused.values()))

    for plan, place in jobs:
        try:
            check_export(plan, place, source)
            ready.append((plan, place))
        except EdgekitError as error:
            leave_out(plan, error)
    progress = options.report.progress
    progress(0, 1, "reading the model")
    calibration = calibration_for(source, [plan.recipe for plan, _ in ready], options)
    progress(1, 1, "reading the model")
    progress(0, 1, "neutral weights: loading")
    for plan, place in ready:
        try:
            made.append(build_one(plan, place, options, source=source, calibration=calibration))
        except EdgekitError as error:
            leave_out(plan, error)
    if options.prepare:
        _prepare_openings(made, progress)
    return made, refused


def _prepare_openings(artifacts: Sequence[Artifact], progress: Progress) -> None:
    """Open each artifact once, so that its weights are packed for this machine."""
    from edgekit.runtime.open import open_runtime

    for number, artifact in enumerate(artifacts):
        progress(number, len(artifacts), "preparing for this machine")
        open_runtime(artifact.folder, prefixes=0).close()
        progress(number + 1, len(artifacts), "preparing for this machine")


def _planned(
    given: str | Path | Plan | Sequence[Plan], device: Device | None, asked: Mapping[str, Any], options: ExportOptions
) -> tuple[ModelSource, list[Plan]]:
    """Open the model and return it with its plans: the given ones, or new ones for `device`."""
    if isinstance(given, str | Path) and not str(given).endswith(".json"):
        source = open_source(given).with_own_integers()  # downloads them before they are planned
        request, chosen = read_options(PlanRequest, asked), ["this" if device is None else device]
        note = options.report.note
        return source, list(make_plans(source, chosen, request, announce=note, chosen_by=options))
    named = [name for name, value in (("device", device), *asked.items()) if value is not None]
    if named:
        raise InvalidInput(f"{', '.join(named)}: the plan has decided this; leave it out, or give a model")
    if isinstance(given, str | Path):
        plans = [read_plan(Path(given))]
    else:
        plans = [given] if isinstance(given, Plan) else list(given)
    return open_source(plans[0].model_source).with_own_integers(), plans


def _recipe_for(source: ModelSource, given: str | Recipe | None, options: QuantizeOptions) -> Recipe:
    """Choose the recipe as an export would."""
    recipe = None if given is None else find_recipe(given)
    if options.bits_per_weight is not None:
        return of_model(budgeted(source, recipe, options.bits_per_weight), source.spec)
    is_quick = source.spec.encoder is not None or options.rounds_alone(source)
    recipe = of_model(recipe, source.spec) if recipe == SMALL else recipe_of(source, recipe)
    return recipe or RECIPES["s8" if is_quick else "balanced"]
