"""Turn the names of a model and of devices into plans. Writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from edgekit import plugins
from edgekit.common.log import log
from edgekit.common.parsing import parse_json, read_bytes, validate
from edgekit.contracts.device import THIS, DeviceProfile, check_entitlements
from edgekit.contracts.neutral import NeutralManifest, is_neutral, read_manifest
from edgekit.contracts.plan import PLAN_VERSION, Method, Plan
from edgekit.contracts.quality_measurements import read_quality_facts
from edgekit.contracts.recipe import Recipe, named_recipe, with_budget
from edgekit.contracts.target import Target
from edgekit.device.catalogue import all_profiles
from edgekit.device.engine_speeds import engine_speeds, measures
from edgekit.device.load import load_profile
from edgekit.errors import InvalidInput, quote_short
from edgekit.model.source import ModelSource, open_source
from edgekit.model.spec import ModelSpec
from edgekit.planner.candidates import PlanSubject, is_only_listed
from edgekit.planner.engine_choice import TimedEngines
from edgekit.planner.request import PlanRequest
from edgekit.planner.resolver import check_request, resolve, threads_of
from edgekit.quant.effort import calibration_text, usual_method
from edgekit.quant.options import QuantOptions
from edgekit.quant.own_integers import own_integers, recipe_of

_MAX_PLAN_BYTES = 32 << 20
# Equal specs are one object, which the planner's caches find without comparing every layer.
_first_equal: Callable[[ModelSpec], ModelSpec] = lru_cache(maxsize=64)(lambda spec: spec)


def make_plans(
    model: ModelSource | str | Path,
    devices: Sequence[str | Path | DeviceProfile],
    request: PlanRequest | None = None,
    *,
    draft: str | Path | None = None,
    profiles: Sequence[Path] = (),
    announce: Callable[[str], None] | None = None,
    may_measure: bool = True,
    chosen_by: QuantOptions | None = None,
) -> tuple[Plan, ...]:
    """Return one plan per device, in order. Raises `DoesNotFit` with the table of all candidates.

    `model` is an opened model, or a name or path for `open_source`. A device is a name, the path of a profile, `this`,
    or a profile; `profiles` are further folders with profiles. For `this`, the installed engines are timed once for
    models of this size, if `may_measure`; `announce` is called with a message before. `chosen_by` tells
    how an export will choose integers, if not by default.
    """
    source = model if isinstance(model, ModelSource) else open_source(model)
    request = request or PlanRequest()
    neutral = read_manifest(source.folder) if is_neutral(source.folder) else None
    known = all_profiles(profiles)
    selected = [
        each if isinstance(each, DeviceProfile) else known.get(str(each)) or load_profile(each, profiles)
        for each in devices
    ]
    check_entitlements(request.entitlements, (*selected, *known.values()))
    targets = _candidates_for(selected, request)
    own, notes = None if neutral is not None else own_integers(source), source.notes
    if neutral is not None:
        request = _with_stored_recipe(source, neutral, request)
    elif request.bits_per_weight is not None:
        recipe = budgeted(source, request.recipe, request.bits_per_weight)
        request = request.model_copy(update={"recipe": recipe})
    elif request.recipe is None and own and not _all_hold(own.recipe, source.spec, selected, targets, request):
        where = " and ".join("this machine" if device.name == THIS else device.name for device in selected)
        notes = (*notes, f"its own integers ({own.recipe.keeps}) are not kept: no target for {where} holds them")
    else:
        request = request.model_copy(update={"recipe": recipe_of(source, request.recipe)})
    subject = PlanSubject(
        model=_first_equal(neutral.model if neutral else source.spec),
        source=source.given,
        is_stored=neutral is not None,
        config_sha256=source.config_sha256,
        draft=open_source(draft).spec if draft is not None else None,
        draft_source=str(draft) if draft is not None else None,
        measured=read_quality_facts(source.config_sha256, source.name),
        method=_method(source, neutral, request.recipe, chosen_by),
        rounds=chosen_by is not None and request.recipe is None and chosen_by.rounds_alone(source),
        quantised_as=None if neutral else source.quantised_as,
        notes=notes,
        rounded_notes=own.notes if own and request.recipe == own.recipe else (),
    )
    if request.drafter is not None:
        subject = subject._replace(drafter=source.read_head(Path(request.drafter), subject.model))
    check_request(subject, request)
    here = [device for device in selected if device.name == THIS]
    if here:
        timed = _timed(subject.model, here[0], targets, request, announce, may_measure)
        subject = subject._replace(timed=timed)
    plans = resolve(subject, selected, targets, request, others=tuple(known.values()))
    if neutral is None:
        return plans
    return tuple(plan.model_copy(update={"quantisation": neutral.quantisation}) for plan in plans)


def _all_hold(
    recipe: Recipe,
    model: ModelSpec,
    devices: Sequence[DeviceProfile],
    targets: Mapping[str, Target],
    request: PlanRequest,
) -> bool:
    """Return True if every device has a target that runs the model in this recipe."""

    def holds(target: Target, device: DeviceProfile) -> bool:
        backends = dict.fromkeys(offer.backend for offer in target.offers(model, device))
        offers = (target.offer(model, device, backend, target.fitted(recipe, model)) for backend in backends)
        return any(not is_only_listed(offer, request) for offer in offers)

    return all(any(holds(target, device) for target in targets.values()) for device in devices)


def budgeted(source: ModelSource, recipe: Recipe | None, bits: float) -> Recipe:
    """Return a recipe, or `balanced`, with a budget of `bits` per weight of the model."""
    if recipe is not None and recipe.keeps is not None:
        raise InvalidInput("--bits-per-weight: recipe keep takes the integers as they are; choose one of the two")
    return with_budget(recipe or named_recipe("balanced"), source.spec, bits)


def _method(
    source: ModelSource, neutral: NeutralManifest | None, recipe: Recipe | None, chosen_by: QuantOptions | None
) -> Method:
    """Return the method by which integers of 4 bits were or will be chosen; before an export, on a usual machine."""
    if neutral is not None:
        return neutral.quantisation.method
    recipe = recipe or named_recipe("balanced")
    if chosen_by is None or not recipe.has_few_bits:
        return usual_method(source.spec, recipe)
    if chosen_by.calibrate is not None:
        return chosen_by.method or "gptq"
    text = calibration_text(None, chosen_by.method, chosen_by.effort, source, [recipe])
    return "rtn" if text is None else chosen_by.method or "gptq"


def _with_stored_recipe(source: ModelSource, neutral: NeutralManifest, request: PlanRequest) -> PlanRequest:
    """Set the recipe of quantised weights, the only one in which they can be planned; refuse any other."""
    if request.bits_per_weight is not None:
        raise InvalidInput(
            f"{source.given}: is quantised already; leave out --bits-per-weight, or give the float model"
        )
    if request.recipe is not None and request.recipe.name != neutral.recipe.name:
        raise InvalidInput(
            f"{source.given}: is quantised already, as {neutral.recipe.name}; leave out --recipe {request.recipe.name},"
            " or give the float model"
        )
    return request.model_copy(update={"recipe": neutral.recipe})


def targets_for(name: str | None) -> dict[str, Target]:
    """Load the target called `name`, or every installed one."""
    names = [name] if name else plugins.target_names()
    return {each: plugins.load_target(each) for each in names}


def _candidates_for(devices: Sequence[DeviceProfile], request: PlanRequest) -> dict[str, Target]:
    """Load the targets to plan for. If `this` is the only device, only usable targets count, unless none is usable."""
    targets = targets_for(request.target)
    if request.target is not None or {device.name for device in devices} != {THIS}:
        return targets
    return {name: target for name, target in targets.items() if target.missing() is None} or targets


def _timed(
    model: ModelSpec,
    device: DeviceProfile,
    targets: Mapping[str, Target],
    request: PlanRequest,
    announce: Callable[[str], None] | None,
    may_measure: bool,
) -> TimedEngines:
    """Return the speeds of the targets that can run the model here, measuring those that are not known yet."""
    if not measures():
        return TimedEngines()
    usable = {name: target for name, target in sorted(targets.items()) if target.missing() is None}
    offers = {name: target.offers(model, device) for name, target in usable.items()}
    names = [name for name in offers if any(each.can_be_timed and each.refusal is None for each in offers[name])]
    threads = threads_of(device, request)
    return TimedEngines(
        engine_speeds(model, names, threads=threads, announce=announce or log.info, may_measure=may_measure)
    )


def read_plan(path: Path) -> Plan:
    """Read a plan that `edgekit plan -o` wrote."""
    data = read_bytes(path, _MAX_PLAN_BYTES)
    version = parse_json(data, str(path)).get("version")
    if not isinstance(version, int) or version > PLAN_VERSION:
        raise InvalidInput(
            f"{path}: plan version {quote_short(version)}, this edgekit reads up to {PLAN_VERSION}; upgrade edgekit"
        )
    return validate(data, Plan, str(path))
