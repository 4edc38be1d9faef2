"""Searches the smallest change that would make a rejected candidate pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from edgekit.common.units import show_bytes
from edgekit.contracts.device import DeviceProfile
from edgekit.contracts.plan import Failure, Violation
from edgekit.contracts.target import Offer
from edgekit.model.spec import ModelSpec
from edgekit.planner.candidates import Candidate
from edgekit.planner.ladder import ContextConfig, furthest_context, smaller_contexts, windows


class FixSearch(NamedTuple):
    """The alternatives that a search for fixes may try: candidates of the backend, settings and devices."""

    device: DeviceProfile
    siblings: Sequence[Candidate]
    price: Callable[[Offer, ContextConfig], Candidate]
    over: Callable[[Candidate], int]  # bytes over budget on this device
    over_on: Callable[[Candidate, DeviceProfile], int]
    faster_on: Callable[[Candidate, DeviceProfile], bool]
    others: Sequence[DeviceProfile]


def failures(model: ModelSpec, candidate: Candidate, search: FixSearch) -> tuple[Failure, ...]:
    """Return every violation of a candidate with its fix."""
    return tuple(
        Failure(
            what=violation.what,
            found=violation.found,
            allowed=violation.allowed,
            cure=_fix(model, candidate, violation, search),
        )
        for violation in candidate.violations
    )


def _fix(model: ModelSpec, candidate: Candidate, violation: Violation, search: FixSearch) -> str:
    if violation.what == "memory":
        return _memory_fix(model, candidate, search)
    if violation.what in ("context", "window"):
        or_window = ", or a window" if violation.what == "context" else ""
        furthest = furthest_context(model, candidate.offer.capabilities)
        return f"{violation.what} {candidate.setting.held_tokens} → {furthest}{or_window}"
    fixed = {
        "offer": "another target or backend",
        "target": f"--target {candidate.offer.target}",
        "cache bits": f"--kv-bits {min(candidate.offer.capabilities.kv_bits)}, or another target or backend",
        "exits": "another target or backend, or no --exit",
        "drafter": "onnx on the CPU, mlx or executorch on XNNPACK, or no --drafter",
        "GPU layers": "llamacpp on a device with a GPU, with as many layers as the model has, or no --gpu-layers",
    }
    if violation.what in fixed:
        return fixed[violation.what]
    if violation.what == "adapters" and candidate.offer.recipe.smooth and candidate.offer.capabilities.adapters:
        return f"recipe {candidate.offer.recipe.plain_name}, whose weights adapters fit"
    if violation.what == "adapters":
        return "another target or backend, or the adapter merged into the weights before quantising"
    return _other_recipe(candidate, violation.what, search) or _faster_device(candidate, violation.what, search)


def _memory_fix(model: ModelSpec, candidate: Candidate, search: FixSearch) -> str:
    """Suggest up to two changes of cache bits, context, window or recipe, and the smallest larger device."""
    ways = list(islice(_ways(model, candidate, search), 2))  # no third one is searched
    over = search.over(candidate)
    bigger = _smallest_device(lambda device: search.over_on(candidate, device) <= 0, candidate, search)
    needs = f"needs {show_bytes(over)} more" + (f": {bigger} and up" if bigger else "")
    return "; ".join([*ways, needs])


def _ways(model: ModelSpec, candidate: Candidate, search: FixSearch) -> Iterator[str]:
    """Yield the changes that make a candidate fit."""
    if bits := _fewer_bits(candidate, search):
        yield bits
    yield from filter(None, _shorter(model, candidate, search))
    if recipe := _other_recipe(candidate, "memory", search):
        yield recipe


def _fewer_bits(candidate: Candidate, search: FixSearch) -> str | None:
    setting = candidate.setting
    for bits in candidate.offer.capabilities.kv_bits:
        if bits < setting.kv_bits and search.over(search.price(candidate.offer, setting._replace(kv_bits=bits))) <= 0:
            return f"cache bits {setting.kv_bits} → {bits}"
    return None


def _shorter(model: ModelSpec, candidate: Candidate, search: FixSearch) -> Iterable[str | None]:
    """Yield the largest context and the largest window that fit; a requested window is only made smaller."""
    setting, offer = candidate.setting, candidate.offer

    def fits(other: ContextConfig) -> bool:
        return search.over(search.price(offer, other._replace(kv_bits=setting.kv_bits))) <= 0

    if setting.policy.window is not None:
        smaller = _first(
            (
                other
                for other in windows(model, offer.capabilities, setting.policy.window)
                if other.held_tokens < setting.held_tokens
            ),
            fits,
        )
        yield f"window {setting.policy.window} → {smaller.held_tokens}" if smaller else None
        return
    context = _first(smaller_contexts(model, offer.capabilities, setting.context), fits)
    yield f"context {setting.context} → {context.context}" if context else None
    window = _first(windows(model, offer.capabilities, setting.context), fits)
    yield f"a window of {window.held_tokens} with {window.policy.sinks} sinks" if window else None


def _first(settings: Iterable[ContextConfig], fits: Callable[[ContextConfig], bool]) -> ContextConfig | None:
    """Return the first setting that fits, by bisection, since each setting is smaller than the one before."""
    ordered = list(settings)
    if not ordered or not fits(ordered[-1]):
        return None
    low, high = 0, len(ordered) - 1
    while low < high:
        middle = (low + high) // 2
        if fits(ordered[middle]):
            high = middle
        else:
            low = middle + 1
    return ordered[low]


def _other_recipe(candidate: Candidate, what: str, search: FixSearch) -> str | None:
    setting = candidate.setting
    priced = [other if other.setting == setting else search.price(other.offer, setting) for other in search.siblings]
    passing = [other for other in priced if all(violation.what != what for violation in other.violations)]
    fitting = [other for other in passing if not other.violations] or passing
    if not fitting:
        return None
    nearest = (
        max(fitting, key=lambda other: other.quality.loss)
        if what == "quality"
        else min(fitting, key=lambda other: other.quality.loss)
    )
    return f"recipe {nearest.offer.recipe.name}"


def _faster_device(candidate: Candidate, what: str, search: FixSearch) -> str:
    if what == "quality":
        return "no recipe of this backend is better: lower --min-quality"
    device = _smallest_device(lambda other: search.faster_on(candidate, other), candidate, search)
    return (
        f"a faster device: {device} and up" if device else "no known device of this kind is fast enough: ask for less"
    )


def _smallest_device(passes: Callable[[DeviceProfile], bool], candidate: Candidate, search: FixSearch) -> str | None:
    """Return the smallest device of the same system and kind on which the same backend passes."""
    offer = candidate.offer
    alike = [
        other
        for other in search.others
        if other.os == search.device.os
        and other.kind == search.device.kind
        and offer.backend in other.targets.get(offer.target, ())
        and other.name != search.device.name
    ]
    alike.sort(key=lambda other: ((other.vram or other.ram).value, other.usable_bandwidth_gb_s.value, other.name))
    return next((other.title for other in alike if passes(other)), None)
