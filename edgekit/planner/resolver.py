"""Chooses one candidate per device, with one recipe for all devices, and explains why every other offer lost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from edgekit.contracts.capabilities import model_refusal
from edgekit.contracts.device import Budget, DeviceProfile
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.contracts.plan import FallbackStep, Plan, Rejected, source_notes
from edgekit.contracts.recipe import RECIPES, SMALL, bits_per_weight, needs_text
from edgekit.contracts.stored_weights import group_notes, sharing_notes
from edgekit.contracts.target import Offer, Target
from edgekit.device.catalogue import profile_sha256
from edgekit.errors import DoesNotFit, InvalidInput, Unsupported, quote_short
from edgekit.planner.candidates import (
    Candidate,
    PlanSubject,
    allowed_bytes,
    chunk_tokens,
    is_only_listed,
    over_bytes,
    price,
)
from edgekit.planner.fixes import FixSearch, failures
from edgekit.planner.ladder import ladder
from edgekit.planner.request import PlanRequest
from edgekit.planner.speed import cache_price_notes, touched_notes
from edgekit.planner.table import distance, table_of

# The order of `--prefer balanced`: the recipe of that name, then the calibrated 4-bit family (the middle group, the
# smaller file, the better one); more bits only if --min-quality or the target rules those out.
BALANCED = ("balanced", "s4-g64", "s4-g128", "s4-g32", "mixed-4.5", "s8", "float16", "float32")
ROUNDED = ("s8", "s4-g32", "s4-g64", "s4-g128", "float16", "float32")  # to the nearest, of which four bits suffer
MAX_THREADS = 16
_KV_BITS = (4, 8, 16, 32)  # cache widths that some engine has


class RankedCandidates(NamedTuple):
    """The candidates of one device."""

    device: DeviceProfile
    budget: Budget
    passing: tuple[Candidate, ...]  # those that meet the request, best first
    requested: tuple[Candidate, ...]  # every offer in the requested setting
    targets: Mapping[str, Target]


def resolve(
    subject: PlanSubject,
    devices: Sequence[DeviceProfile],
    targets: Mapping[str, Target],
    request: PlanRequest,
    *,
    others: Sequence[DeviceProfile] = (),
) -> tuple[Plan, ...]:
    """Return one plan per device, in order. They share one recipe, and so one quantisation.

    `others` are further devices that a fix may name. Raises `DoesNotFit` with the table of all candidates.
    """
    rankings = [_ranked(subject, device, targets, request) for device in devices]
    if unfit := [ranked for ranked in rankings if not ranked.passing]:
        rejected = {ranked.device.name: _rejections(subject, ranked, None, request, others) for ranked in unfit}
        nearest = _nearest(next(iter(rejected.values())))
        message = f"{quote_short(subject.source)} does not fit {', '.join(rejected)} as asked"
        message += f"; nearest: {nearest}" if nearest else ""
        missed = {failure.what for rows in rejected.values() for row in rows for failure in row.failures}
        if "memory" in missed and not subject.is_stored:
            message += _as_small(subject, devices, targets, request)
        raise DoesNotFit(message, table_of(rejected), rejected)
    if len(rankings) == 1:
        taken = [ranked.passing[0] for ranked in rankings]
    else:
        taken = _shared(subject, rankings, request, others)
    return tuple(
        _plan(subject, ranked, candidate, request, others) for ranked, candidate in zip(rankings, taken, strict=True)
    )


def check_request(subject: PlanSubject, request: PlanRequest) -> None:
    """Refuse a request that no target could serve for this model; otherwise every row of the table would report it."""
    layers = len(subject.model.layers)
    outside = [layer for layer in request.exits if layer >= layers]
    if outside:
        raise InvalidInput(f"--exit {outside[0]}: {subject.source} has {layers} layers; leave after 1 to {layers - 1}")
    if request.kv_bits is not None and request.kv_bits not in _KV_BITS:
        choices = ", ".join(map(str, _KV_BITS))
        raise InvalidInput(f"--kv-bits {request.kv_bits}: no target keeps such a cache; choose one of {choices}")


def _ranked(
    subject: PlanSubject, device: DeviceProfile, targets: Mapping[str, Target], request: PlanRequest
) -> RankedCandidates:
    budget = device.budget(request.os_version, frozenset(request.entitlements))
    passing: list[Candidate] = []
    requested: list[Candidate] = []
    for offer in _offers(subject, device, targets, request):
        is_listed = is_only_listed(offer, request)
        target, settings = targets[offer.target], list(ladder(subject.model, offer.capabilities, request))
        for setting in settings:
            if is_listed and setting.fallback_step != (0, 0, 0):
                continue  # no other setting would make it eligible
            candidate = price(subject, target, offer, setting, device, budget, request)
            if setting.fallback_step == (0, 0, 0):
                requested.append(candidate)
                if over_bytes(candidate.estimate, budget, request) > 0:  # so are all, if the last is, which takes least
                    last = price(subject, target, offer, settings[-1], device, budget, request)
                    is_listed = is_listed or over_bytes(last.estimate, budget, request) > 0
            if not candidate.violations:
                passing.append(candidate)
                break
    unnamed = sorted({candidate.offer.target for candidate in requested if candidate.offer.only_by_name})
    if not passing and request.target is None and unnamed:
        # A target that is only taken by name is better than none.
        named = (_ranked(subject, device, targets, request.model_copy(update={"target": name})) for name in unnamed)
        passing = next((list(ranked.passing) for ranked in named if ranked.passing), [])
    passing.sort(key=lambda candidate: _order(subject, candidate, device, request))
    requested.sort(key=lambda candidate: _place(candidate, device))
    return RankedCandidates(device, budget, tuple(passing), tuple(requested), targets)


def _offers(
    subject: PlanSubject, device: DeviceProfile, targets: Mapping[str, Target], request: PlanRequest
) -> Iterator[Offer]:
    names = [name for name in targets if request.target in (None, name)]
    any_offer = False
    for name in names:
        offers = [as_measured(offer, subject, device) for offer in targets[name].offers(subject.model, device)]
        backends = {offer.backend: [other for other in offers if other.backend == offer.backend] for offer in offers}
        for alike in backends.values():
            if reason := model_refusal(subject.model, alike[0].capabilities):
                any_offer = True
                yield alike[0].model_copy(update={"unavailable": reason})
                continue
            for offer in _with_recipe(targets[name], subject, device, alike, request):
                any_offer = True
                yield offer
    if not any_offer:
        if request.recipe is not None and request.recipe.name == SMALL.name:
            held = "mlx packs such weights" if subject.is_stored else "mlx and llamacpp hold recipe small"
            none = f"{device.name}: {request.target or 'no target here'} has no format of 3 bits"
            raise Unsupported(f"{none}; {held}, or take --recipe mixed-4.5 of the float model")
        recipe = f" with recipe {request.recipe.name}" if request.recipe else ""
        what = f"{request.target} has nothing" if request.target else "no target has anything"
        runs = ", ".join(f"{target} ({'/'.join(backends)})" for target, backends in device.targets.items()) or "nothing"
        raise Unsupported(
            f"{device.name}: {what} to offer here{recipe}; this device runs"
            f" {runs}, and the targets installed are {', '.join(targets) or 'none'}"
        )


def as_measured(offer: Offer, subject: PlanSubject, device: DeviceProfile) -> Offer:
    """Return the offer with the engine speed and runtime memory that were measured on this device, if any."""
    offer = subject.timed.price(subject.model, offer, device)
    base = device.runtime_base.get(f"{offer.target}.{offer.backend}")
    if base is None:
        return offer
    source = f"{offer.memory.source}; runtime before any model: {base.source}"
    memory = offer.memory.model_copy(update={"runtime_bytes": base.value, "source": source})
    return offer.model_copy(update={"memory": memory})


def _with_recipe(
    target: Target, subject: PlanSubject, device: DeviceProfile, offers: list[Offer], request: PlanRequest
) -> Iterator[Offer]:
    """Yield the offers of one backend that the request allows; a custom recipe replaces the built-in ones."""
    if request.recipe is None:
        named = (offer for offer in offers if not offer.recipe.is_rare())
        yield from (each for each in named if not subject.rounds or not needs_text(each.recipe, subject.model))
        return
    recipe = request.recipe if subject.is_stored else target.fitted(request.recipe, subject.model)
    # A source's own integers may have formats that no built-in recipe has; then the target decides.
    known = {str(rule.format) for offer in offers for rule in offer.recipe.rules}
    if recipe.keeps is None and any(str(rule.format) not in known for rule in recipe.rules):
        return
    offer = as_measured(target.offer(subject.model, device, offers[0].backend, recipe), subject, device)
    budget, least = recipe.bits_per_weight, bits_per_weight(subject.model, recipe)
    is_asked_for = not subject.is_stored and request.recipe not in RECIPES.values()  # a built-in one only notes it
    if is_asked_for and budget is not None and budget < least:
        offer = offer.model_copy(update={"unavailable": f"needs at least {least:.2f} bits per weight here"})
    yield offer


def _order(
    subject: PlanSubject, candidate: Candidate, device: DeviceProfile, request: PlanRequest
) -> tuple[object, ...]:
    """Return the sort key; smaller is better. Free memory is no part of it, so more memory never gives a worse plan."""
    return (
        candidate.setting.fallback_step,
        _preference(subject, candidate, request),
        subject.timed.request_s(candidate.offer, device, candidate.speed),
        _place(candidate, device),
        -candidate.speed.decode_tokens_per_s,
        not candidate.offer.recipe.smooth,  # targets offer it where they round inputs
        candidate.offer.recipe.name,
    )


def _place(candidate: Candidate, device: DeviceProfile) -> tuple[int, int]:
    """Return the rank of a target and backend in the device profile; unlisted ones come last."""
    targets = list(device.targets)
    if candidate.offer.target not in targets:
        return len(targets), 0
    backends = device.targets[candidate.offer.target]
    backend = backends.index(candidate.offer.backend) if candidate.offer.backend in backends else len(backends)
    return targets.index(candidate.offer.target), backend


def _preference(subject: PlanSubject, candidate: Candidate, request: PlanRequest) -> float:
    name = candidate.offer.recipe.plain_name
    if request.prefer == "balanced":
        order = ROUNDED if subject.rounds or subject.model.encoder else BALANCED
        return order.index(name) if name in order else -1.0
    if request.prefer == "speed":
        return -candidate.speed.decode_tokens_per_s
    if request.prefer == "memory":
        return candidate.estimate.total_bytes + (candidate.estimate.gpu_bytes or 0)
    return candidate.quality.loss


def _shared(
    subject: PlanSubject, rankings: list[RankedCandidates], request: PlanRequest, others: Sequence[DeviceProfile]
) -> list[Candidate]:
    """Return each device's best candidate in one shared recipe: the recipe that costs the worst device least."""
    recipes = [{candidate.offer.recipe.name for candidate in ranked.passing} for ranked in rankings]
    common = set.intersection(*recipes)
    if not common:
        rejected = {ranked.device.name: _rejections(subject, ranked, None, request, others) for ranked in rankings}
        each = "; ".join(f"{ranked.device.name}: {ranked.passing[0].offer.recipe.name}" for ranked in rankings)
        raise DoesNotFit(f"no single recipe fits all devices ({each}); plan each device alone", table_of(rejected))

    def best(name: str) -> list[Candidate]:
        return [
            next(candidate for candidate in ranked.passing if candidate.offer.recipe.name == name)
            for ranked in rankings
        ]

    def order(name: str) -> tuple[object, ...]:
        candidates = best(name)
        places = (ranked.passing.index(each) for ranked, each in zip(rankings, candidates, strict=True))
        worst = max(candidate.setting.fallback_step for candidate in candidates)
        if request.prefer == "speed":
            preference = -sum(math.log(candidate.speed.decode_tokens_per_s) for candidate in candidates)
        else:
            preference = sum(_preference(subject, candidate, request) for candidate in candidates)
        return (worst, preference, sum(places), name)

    return best(min(common, key=order))


def _plan(
    subject: PlanSubject,
    ranked: RankedCandidates,
    candidate: Candidate,
    request: PlanRequest,
    others: Sequence[DeviceProfile],
) -> Plan:
    device, offer, setting = ranked.device, candidate.offer, candidate.setting
    allowed = allowed_bytes(candidate.estimate, ranked.budget, request)
    return Plan(
        model=subject.model,
        model_source=subject.source,
        model_sha256=subject.config_sha256,
        quantised_as=subject.quantised_as,
        device=device.name,
        device_sha256=profile_sha256(device),
        os_version=request.os_version or device.os_version,
        target=offer.target,
        backend=offer.backend,
        recipe=offer.recipe,
        context=setting.context,
        sequences=request.sequences,
        chunk_tokens=chunk_tokens(subject.model, setting),
        cache=setting.policy,
        storage=KVCacheConfig(capacity_tokens=setting.held_tokens, kv_bits=setting.kv_bits),
        exits=tuple(sorted(set(request.exits))),
        adapter_rank=request.adapter_rank,
        threads=threads_of(device, request),
        gpu_layers=candidate.gpu_layers,
        draft=subject.draft_source,
        drafter=subject.head_of(offer),
        drafter_source=request.drafter,
        estimate=candidate.estimate,
        memory=offer.memory,
        budget_bytes=allowed[0],
        budget_why=allowed[1],
        speed=candidate.speed,
        quality=candidate.quality,
        ladder=_steps(ranked, candidate),
        rejected=_rejections(subject, ranked, candidate, request, others),
        notes=(
            *([f"sizes only, this model cannot be exported: {unfit}"] if (unfit := subject.model.exportable) else []),
            *subject.notes,
            *source_notes(subject.quantised_as, offer.recipe),
            *(subject.rounded_notes if offer.recipe.keeps else ()),
            *offer.notes,
            *sharing_notes(subject.model, offer.recipe, offer.memory),
            *touched_notes(subject.model, offer.recipe, offer.memory),
            *cache_price_notes(subject.model, offer, device, held_tokens=setting.held_tokens, kv_bits=setting.kv_bits),
            *group_notes(subject.model, offer.recipe),
            *subject.timed.notes(device, [(each.offer, each.speed) for each in ranked.passing], offer.recipe),
        ),
        facts=candidate.facts,
    )


def threads_of(device: DeviceProfile, request: PlanRequest) -> int:
    """Return the number of threads: as requested, or of the profile, or one for each core."""
    return request.threads or min((device.threads or device.cores).value, MAX_THREADS)


def _steps(ranked: RankedCandidates, candidate: Candidate) -> tuple[FallbackStep, ...]:
    """Return the change from the requested setting to the chosen one, with the bytes that it saves."""
    if candidate.setting.fallback_step == (0, 0, 0):
        return ()
    requested = next(other for other in ranked.requested if other.offer == candidate.offer)
    saved = requested.estimate.total_bytes - candidate.estimate.total_bytes
    return (FallbackStep(change=f"{requested.setting.describe()} → {candidate.setting.describe()}", saved_bytes=saved),)


def _rejections(
    subject: PlanSubject,
    ranked: RankedCandidates,
    taken: Candidate | None,
    request: PlanRequest,
    others: Sequence[DeviceProfile],
) -> tuple[Rejected, ...]:
    rejected = []
    for candidate in ranked.requested:
        if taken is not None and candidate.offer == taken.offer:
            continue
        rejected.append(
            Rejected(
                target=candidate.offer.target,
                backend=candidate.offer.backend,
                recipe=candidate.offer.recipe.name,
                context=candidate.setting.context,
                failures=failures(subject.model, candidate, _fix_search(subject, ranked, candidate, request, others)),
                reason=_reason(subject, ranked.device, candidate, taken, request),
                estimate=candidate.estimate,
                speed=candidate.speed,
                quality=candidate.quality,
            )
        )
    return tuple(rejected)


def _fix_search(
    subject: PlanSubject,
    ranked: RankedCandidates,
    candidate: Candidate,
    request: PlanRequest,
    others: Sequence[DeviceProfile],
) -> FixSearch:
    siblings = [
        other
        for other in ranked.requested
        if (other.offer.target, other.offer.backend) == (candidate.offer.target, candidate.offer.backend)
    ]

    def over_on(other: Candidate, device: DeviceProfile) -> int:
        return over_bytes(other.estimate, device.budget(None, frozenset(request.entitlements)), request)

    target = ranked.targets[candidate.offer.target]

    def faster_on(other: Candidate, device: DeviceProfile) -> bool:
        priced = price(subject, target, other.offer, other.setting, device, device.budget(), request)
        return all(violation.what not in ("speed", "first token", "memory") for violation in priced.violations)

    return FixSearch(
        device=ranked.device,
        siblings=siblings,
        price=lambda offer, setting: price(subject, target, offer, setting, ranked.device, ranked.budget, request),
        over=lambda other: over_bytes(other.estimate, ranked.budget, request),
        over_on=over_on,
        faster_on=faster_on,
        others=others,
    )


def _reason(
    subject: PlanSubject, device: DeviceProfile, candidate: Candidate, taken: Candidate | None, request: PlanRequest
) -> str:
    if candidate.violations:
        return f"misses {' and '.join(violation.what for violation in candidate.violations)}"
    if taken is None:
        return "fits, but not on every device that was asked for"
    if candidate.offer.recipe == taken.offer.recipe and subject.timed.of(candidate.offer, device):
        return f"fits; {taken.offer.target} {taken.offer.backend} is faster on this machine"
    if candidate.offer.recipe == taken.offer.recipe:
        return f"fits; this device prefers {taken.offer.target} {taken.offer.backend}"
    return f"fits; --prefer {request.prefer} takes {taken.offer.recipe.name}"


def _as_small(
    subject: PlanSubject, devices: Sequence[DeviceProfile], targets: Mapping[str, Target], request: PlanRequest
) -> str:
    """Offer the recipe of 3 bits where it fits all devices, with what it is expected to lose."""
    request = request.model_copy(update={"recipe": SMALL})
    with suppress(Unsupported):
        rankings = [_ranked(subject, device, targets, request) for device in devices]
        if all(ranked.passing for ranked in rankings):
            worst = max((ranked.passing[0] for ranked in rankings), key=lambda each: each.quality.loss)
            return f"; --recipe {SMALL.name} fits, on {worst.offer.target} ({worst.quality.show()})"
    return ""


def _nearest(rejected: Sequence[Rejected]) -> str | None:
    """Describe the rejected candidate with the fewest violations, then the fewest bytes, and its first fix."""
    near = min((candidate for candidate in rejected if candidate.failures), key=distance, default=None)
    if near is None:
        return None
    failure = near.failures[0]
    missed = f"{failure.what} {failure.found}, allowed {failure.allowed} ({failure.cure})"
    return f"{near.target} {near.backend} {near.recipe}: {missed}"
