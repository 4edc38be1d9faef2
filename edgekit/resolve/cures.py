"""The smallest change that would make a rejected option pass. Tries; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from edgekit.device import DeviceProfile
from edgekit.interfaces import Offer
from edgekit.model import ModelSpec
from edgekit.plan import Failure
from edgekit.resolve.options import Miss, Option
from edgekit.resolve.settings import Setting, furthest_context, smaller_contexts, windows
from edgekit.units import show_bytes


class Bench(NamedTuple):
    """What a search for cures may vary: other offers of the same backend, settings, and other devices."""

    device: DeviceProfile
    siblings: Sequence[Offer]
    price: Callable[[Offer, Setting], Option]
    over: Callable[[Option], int]  # bytes over budget on this device
    over_on: Callable[[Option, DeviceProfile], int]
    faster_on: Callable[[Option, DeviceProfile], bool]
    others: Sequence[DeviceProfile]


def failures(model: ModelSpec, option: Option, bench: Bench) -> tuple[Failure, ...]:
    """Every miss of an option with its cure."""
    return tuple(
        Failure(what=miss.what, found=miss.found, allowed=miss.allowed, cure=_cure(model, option, miss, bench))
        for miss in option.misses
    )


def _cure(model: ModelSpec, option: Option, miss: Miss, bench: Bench) -> str:
    if miss.what == "memory":
        return _memory_cure(model, option, bench)
    if miss.what in ("context", "window"):
        or_window = ", or a window" if miss.what == "context" else ""
        return f"{miss.what} {option.setting.held_tokens} → {furthest_context(model, option.offer)}{or_window}"
    if miss.what == "offer":
        return "another target or backend"
    if miss.what == "cache bits":
        return f"--kv-bits {min(option.offer.kv_bits)}, or another target or backend"
    if miss.what == "exits":
        return "another target or backend, or no --exit"
    if miss.what == "adapters":
        return "another target or backend, or the adapter merged into the weights before quantising"
    return _other_recipe(option, miss.what, bench) or _faster_device(option, miss.what, bench)


def _memory_cure(model: ModelSpec, option: Option, bench: Bench) -> str:
    """Cache bits, a smaller context, a window, another recipe; and which device would hold it as it is."""
    ways = [
        way
        for way in (_fewer_bits(option, bench), *_shorter(model, option, bench), _smaller_recipe(option, bench))
        if way
    ]
    over = bench.over(option)
    bigger = _smallest_device(lambda device: bench.over_on(option, device) <= 0, option, bench)
    needs = f"needs {show_bytes(over)} more" + (f": {bigger} and up" if bigger else "")
    return "; ".join([*ways[:2], needs])


def _fewer_bits(option: Option, bench: Bench) -> str | None:
    setting = option.setting
    for bits in option.offer.kv_bits:
        if bits < setting.kv_bits and bench.over(bench.price(option.offer, setting._replace(kv_bits=bits))) <= 0:
            return f"cache bits {setting.kv_bits} → {bits}"
    return None


def _shorter(model: ModelSpec, option: Option, bench: Bench) -> Iterable[str | None]:
    """The smaller context that fits and the window that fits; a window that was asked for is only made smaller."""
    setting, offer = option.setting, option.offer

    def fits(other: Setting) -> bool:
        return bench.over(bench.price(offer, other._replace(kv_bits=setting.kv_bits))) <= 0

    if setting.policy.window is not None:
        smaller = _first(
            (
                other
                for other in windows(model, offer, setting.policy.window)
                if other.held_tokens < setting.held_tokens
            ),
            fits,
        )
        yield f"window {setting.policy.window} → {smaller.held_tokens}" if smaller else None
        return
    context = _first(smaller_contexts(model, offer, setting.context), fits)
    yield f"context {setting.context} → {context.context}" if context else None
    window = _first(windows(model, offer, setting.context), fits)
    yield f"a window of {window.held_tokens} with {window.policy.sinks} sinks" if window else None


def _first(settings: Iterable[Setting], fits: Callable[[Setting], bool]) -> Setting | None:
    """The first setting that fits, of settings that only get smaller: found by halving."""
    found = list(settings)
    low, high = 0, len(found)
    while low < high:
        middle = (low + high) // 2
        if fits(found[middle]):
            high = middle
        else:
            low = middle + 1
    return found[low] if low < len(found) else None


def _smaller_recipe(option: Option, bench: Bench) -> str | None:
    passing = [
        other
        for offer in bench.siblings
        if offer.recipe.name != option.offer.recipe.name
        and bench.over(other := bench.price(offer, option.setting)) <= 0
        and not other.misses
    ]
    best = min(passing, key=lambda other: other.quality.kl, default=None)
    return f"recipe {best.offer.recipe.name}" if best else None


def _other_recipe(option: Option, what: str, bench: Bench) -> str | None:
    priced = [bench.price(offer, option.setting) for offer in bench.siblings]
    passing = [other for other in priced if all(miss.what != what for miss in other.misses)]
    fitting = [other for other in passing if not other.misses] or passing
    if not fitting:
        return None
    nearest = (
        max(fitting, key=lambda other: other.quality.kl)
        if what == "quality"
        else min(fitting, key=lambda other: other.quality.kl)
    )
    return f"recipe {nearest.offer.recipe.name}"


def _faster_device(option: Option, what: str, bench: Bench) -> str:
    if what == "quality":
        return "no recipe of this backend is better: lower --min-quality"
    device = _smallest_device(lambda other: bench.faster_on(option, other), option, bench)
    return (
        f"a faster device: {device} and up" if device else "no known device of this kind is fast enough: ask for less"
    )


def _smallest_device(passes: Callable[[DeviceProfile], bool], option: Option, bench: Bench) -> str | None:
    """The smallest device of the same system and kind on which the same backend would pass."""
    offer = option.offer
    alike = [
        other
        for other in bench.others
        if other.os == bench.device.os
        and other.kind == bench.device.kind
        and offer.backend in other.targets.get(offer.target, ())
        and other.name != bench.device.name
    ]
    alike.sort(key=lambda other: ((other.vram or other.ram).value, other.usable_bandwidth_gb_s.value, other.name))
    return next((other.title for other in alike if passes(other)), None)


__all__ = ["Bench", "failures"]
