"""Chooses one option a device, the same recipe for all of them, and says of every other offer why not."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from edgekit.cache import Storage
from edgekit.device import Budget, DeviceProfile
from edgekit.errors import DoesNotFit, InvalidInput, Unsupported, clip
from edgekit.interfaces import Offer, Target
from edgekit.plan import Plan, Rejected, Step
from edgekit.resolve.cures import Bench, failures
from edgekit.resolve.options import CHUNK_TOKENS, Option, Subject, over_bytes, price
from edgekit.resolve.settings import ladder
from edgekit.resolve.table import table_of
from edgekit.resolve.wish import Wish

# `balanced` takes the calibrated 4-bit family: the middle group, the smaller file, then the better ones; above it only
# where --min-quality or the target leaves no other way.
BALANCED = ("s4-g64", "s4-g128", "s4-g32", "mixed-4.5", "s8", "float16", "float32")
MAX_THREADS = 16


class Choice(NamedTuple):
    """One device's options: those that pass, best first by the wish, and the first setting of every offer."""

    device: DeviceProfile
    budget: Budget
    passing: tuple[Option, ...]
    asked: tuple[Option, ...]


def resolve(
    subject: Subject,
    devices: Sequence[DeviceProfile],
    targets: Mapping[str, Target],
    wish: Wish,
    *,
    per_device: bool = False,
    others: Sequence[DeviceProfile] = (),
) -> tuple[Plan, ...]:
    """One plan a device, in order; unless `per_device`, all share one recipe, so that one quantisation serves them.

    `others` are devices that cures may name. Raises `DoesNotFit` with the table of everything that was tried.
    """
    outside = [layer for layer in wish.exits if layer >= len(subject.model.layers)]
    if outside:
        layers = len(subject.model.layers)
        raise InvalidInput(f"--exit {outside[0]}: {subject.source} has {layers} layers; leave after 1 to {layers - 1}")
    choices = [_options(subject, device, targets, wish) for device in devices]
    without = [choice.device.name for choice in choices if not choice.passing]
    if without:
        rejected = {choice.device.name: _rejections(subject, choice, None, wish, others) for choice in choices}
        raise DoesNotFit(_nothing_fits(subject, without, rejected), table_of(rejected), rejected)
    if per_device or len(choices) == 1:
        taken = [choice.passing[0] for choice in choices]
    else:
        taken = _shared(subject, choices, wish, others)
    return tuple(_plan(subject, choice, option, wish, others) for choice, option in zip(choices, taken, strict=True))


def _options(subject: Subject, device: DeviceProfile, targets: Mapping[str, Target], wish: Wish) -> Choice:
    budget = device.budget(wish.os_version, frozenset(wish.entitlements))
    passing: list[Option] = []
    asked: list[Option] = []
    for offer in _offers(subject, device, targets, wish):
        for setting in ladder(subject.model, offer, wish):
            option = price(subject, offer, setting, device, budget, wish)
            if setting.rung == (0, 0, 0):
                asked.append(option)
            if not option.misses:
                passing.append(option)
                break
    passing.sort(key=lambda option: _order(option, device, wish))
    asked.sort(key=lambda option: _place(option, device))
    return Choice(device, budget, tuple(passing), tuple(asked))


def _offers(subject: Subject, device: DeviceProfile, targets: Mapping[str, Target], wish: Wish) -> Iterator[Offer]:
    names = [name for name in targets if wish.target in (None, name)]
    found = False
    for name in names:
        offers = [_as_measured(offer, device) for offer in targets[name].offers(subject.model, device)]
        backends = {offer.backend: [other for other in offers if other.backend == offer.backend] for offer in offers}
        for alike in backends.values():
            for offer in _with_recipe(alike, wish):
                found = True
                yield offer
    if not found:
        asked = f" with recipe {wish.recipe.name}" if wish.recipe else ""
        runs = ", ".join(f"{target} ({'/'.join(backends)})" for target, backends in device.targets.items()) or "nothing"
        raise Unsupported(
            f"{device.name}: {wish.target or 'no target'} has nothing to offer here{asked}; this device runs {runs},"
            f" and the targets installed are {', '.join(targets) or 'none'}"
        )


def _as_measured(offer: Offer, device: DeviceProfile) -> Offer:
    """With what the runtime takes on this very device, where its profile holds it."""
    base = device.runtime_base.get(f"{offer.target}.{offer.backend}")
    if base is None:
        return offer
    source = f"{offer.memory.source}; runtime before any model: {base.source}"
    memory = offer.memory.model_copy(update={"runtime_bytes": base.value, "source": source})
    return offer.model_copy(update={"memory": memory})


def _with_recipe(offers: list[Offer], wish: Wish) -> Iterator[Offer]:
    """The offers of one backend that the wish leaves open; a recipe of one's own takes the place of a built-in one."""
    if wish.recipe is None:
        # A vendor's own formats leave the common weights: only for those who ask by name.
        yield from (offer for offer in offers if not offer.recipe.is_native())
        return
    named = [offer for offer in offers if offer.recipe == wish.recipe]
    if named:
        yield from named
        return
    known = {str(rule.format) for offer in offers for rule in offer.recipe.rules}
    if all(str(rule.format) in known for rule in wish.recipe.rules):
        yield offers[0].model_copy(update={"recipe": wish.recipe})


def _order(option: Option, device: DeviceProfile, wish: Wish) -> tuple[object, ...]:
    """Smaller is better. Nothing in it depends on how much memory there is, so more memory never gives a worse plan."""
    pace = -option.speed.decode_tokens_per_s
    return (option.setting.rung, _preference(option, wish), _place(option, device), pace, option.offer.recipe.name)


def _place(option: Option, device: DeviceProfile) -> tuple[int, int]:
    """Where the profile puts a target and backend; those that it does not name come last."""
    targets = list(device.targets)
    if option.offer.target not in targets:
        return len(targets), 0
    backends = device.targets[option.offer.target]
    backend = backends.index(option.offer.backend) if option.offer.backend in backends else len(backends)
    return targets.index(option.offer.target), backend


def _preference(option: Option, wish: Wish) -> float:
    name = option.offer.recipe.name
    if wish.prefer == "balanced":
        return BALANCED.index(name) if name in BALANCED else -1.0
    if wish.prefer == "speed":
        return -option.speed.decode_tokens_per_s
    if wish.prefer == "memory":
        return option.estimate.total_bytes
    return option.quality.kl


def _shared(subject: Subject, choices: list[Choice], wish: Wish, others: Sequence[DeviceProfile]) -> list[Option]:
    """The recipe that fits every device and gives up least on the worst of them."""
    recipes = [{option.offer.recipe.name for option in choice.passing} for choice in choices]
    common = set.intersection(*recipes)
    if not common:
        rejected = {choice.device.name: _rejections(subject, choice, None, wish, others) for choice in choices}
        each = "; ".join(f"{choice.device.name}: {choice.passing[0].offer.recipe.name}" for choice in choices)
        raise DoesNotFit(
            f"no single recipe fits all devices ({each}); --per-device makes one for each", table_of(rejected)
        )

    def best(name: str) -> list[Option]:
        return [next(option for option in choice.passing if option.offer.recipe.name == name) for choice in choices]

    def order(name: str) -> tuple[object, ...]:
        options = best(name)
        worst = max(option.setting.rung for option in options)
        if wish.prefer == "speed":
            preference = -sum(math.log(option.speed.decode_tokens_per_s) for option in options)
        else:
            preference = sum(_preference(option, wish) for option in options)
        return (worst, preference, name)

    return best(min(common, key=order))


def _plan(subject: Subject, choice: Choice, option: Option, wish: Wish, others: Sequence[DeviceProfile]) -> Plan:
    device, offer, setting = choice.device, option.offer, option.setting
    return Plan(
        model=subject.model,
        model_source=subject.source,
        model_sha256=subject.config_sha256,
        device=device.name,
        device_sha256=hashlib.sha256(device.model_dump_json().encode()).hexdigest(),
        os_version=wish.os_version or device.os_version,
        target=offer.target,
        backend=offer.backend,
        recipe=offer.recipe,
        context=setting.context,
        sequences=wish.sequences,
        chunk_tokens=min(CHUNK_TOKENS, setting.held_tokens),
        cache=setting.policy,
        storage=Storage(capacity_tokens=setting.held_tokens, kv_bits=setting.kv_bits),
        exits=tuple(sorted(set(wish.exits))),
        adapter_rank=wish.adapter_rank,
        threads=wish.threads or min(device.cpu_cores, MAX_THREADS),
        draft=subject.draft_source,
        estimate=option.estimate,
        memory=offer.memory,
        budget_bytes=min(choice.budget.private_bytes, wish.max_memory_bytes or choice.budget.private_bytes),
        budget_why=choice.budget.why,
        speed=option.speed,
        quality=option.quality,
        ladder=_steps(choice, option),
        rejected=_rejections(subject, choice, option, wish, others),
        notes=(*_export_note(subject), *offer.notes, *_group_notes(subject, offer)),
        facts=option.facts,
    )


def _steps(choice: Choice, option: Option) -> tuple[Step, ...]:
    """What was given up against what was asked for, priced."""
    if option.setting.rung == (0, 0, 0):
        return ()
    asked = next(other for other in choice.asked if other.offer == option.offer)
    saved = asked.estimate.total_bytes - option.estimate.total_bytes
    return (Step(change=f"{asked.setting.describe()} → {option.setting.describe()}", saved_bytes=saved),)


def _export_note(subject: Subject) -> Iterator[str]:
    if subject.model.exportable:
        yield f"sizes only, this model cannot be exported: {subject.model.exportable}"


def _group_notes(subject: Subject, offer: Offer) -> Iterator[str]:
    """Where a group does not divide a row, the next smaller one is used, and said."""
    smaller: dict[str, int] = {}
    for tensor in subject.model.tensors():
        found = offer.recipe.format_of(tensor)
        wanted = {str(rule.format) for rule in offer.recipe.rules} | {str(offer.recipe.float_format)}
        if str(found) not in wanted:
            smaller[str(found)] = smaller.get(str(found), 0) + 1
    for form, count in sorted(smaller.items()):
        yield f"{count} tensors are stored as {form}, because the recipe's group does not divide their rows"


def _rejections(
    subject: Subject, choice: Choice, taken: Option | None, wish: Wish, others: Sequence[DeviceProfile]
) -> tuple[Rejected, ...]:
    rejected = []
    for option in choice.asked:
        if taken is not None and option.offer == taken.offer:
            continue
        rejected.append(
            Rejected(
                target=option.offer.target,
                backend=option.offer.backend,
                recipe=option.offer.recipe.name,
                context=option.setting.context,
                failures=failures(subject.model, option, _bench(subject, choice, option, wish, others)),
                reason=_reason(option, taken, wish),
                estimate=option.estimate,
                speed=option.speed,
                quality=option.quality,
            )
        )
    return tuple(rejected)


def _bench(subject: Subject, choice: Choice, option: Option, wish: Wish, others: Sequence[DeviceProfile]) -> Bench:
    siblings = [
        other.offer
        for other in choice.asked
        if (other.offer.target, other.offer.backend) == (option.offer.target, option.offer.backend)
    ]

    def over_on(candidate: Option, device: DeviceProfile) -> int:
        return over_bytes(candidate.estimate, device.budget(None, frozenset(wish.entitlements)), wish)

    def faster_on(candidate: Option, device: DeviceProfile) -> bool:
        there = price(subject, candidate.offer, candidate.setting, device, device.budget(), wish)
        return all(miss.what not in ("speed", "first token", "memory") for miss in there.misses)

    return Bench(
        device=choice.device,
        siblings=siblings,
        price=lambda offer, setting: price(subject, offer, setting, choice.device, choice.budget, wish),
        over=lambda candidate: over_bytes(candidate.estimate, choice.budget, wish),
        over_on=over_on,
        faster_on=faster_on,
        others=others,
    )


def _reason(option: Option, taken: Option | None, wish: Wish) -> str:
    if option.misses:
        return f"misses {' and '.join(miss.what for miss in option.misses)}"
    if taken is None:
        return "fits, but not on every device that was asked for"
    if option.offer.recipe == taken.offer.recipe:
        return f"fits; this device prefers {taken.offer.target} {taken.offer.backend}"
    return f"fits; --prefer {wish.prefer} takes {taken.offer.recipe.name}"


def _nothing_fits(subject: Subject, without: list[str], rejected: Mapping[str, tuple[Rejected, ...]]) -> str:
    nearest = _nearest(rejected[without[0]])
    hint = f"; nearest: {nearest}" if nearest else ""
    return f"{clip(subject.source)} does not fit {', '.join(without)} as asked{hint}"


def _nearest(rejected: Sequence[Rejected]) -> str | None:
    """The option with the fewest misses and the fewest bytes, and its first cure."""
    real = [option for option in rejected if option.failures]
    if not real:
        return None
    near = min(real, key=lambda option: (len(option.failures), option.estimate.total_bytes if option.estimate else 0))
    failure = near.failures[0]
    missed = f"{failure.what} {failure.found}, allowed {failure.allowed} ({failure.cure})"
    return f"{near.target} {near.backend} {near.recipe}: {missed}"
