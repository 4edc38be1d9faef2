"""Writes measured figures into profiles of the user's, from files of `bench --share` and `lab share`.

An engine's bandwidth, the memory of its runtime before any model, and the memory that an app had beyond the profile's
limit are written, each with the files as its source. Plans predict by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from edgekit.common.files import user_profiles, write_file
from edgekit.common.units import show_bytes
from edgekit.contracts.device import DeviceProfile, EngineFigures, SourcedBytes, SourcedNumber, Spread
from edgekit.contracts.shared_measurement import SharedMeasurement, read_shared
from edgekit.device.load import load_profile
from edgekit.errors import InvalidInput

_NARROWEST = (0.9, 1.1)  # what is timed on one machine repeats within this
_IN_BANDWIDTH_MS = 1e-6  # as good as none


class FigureChange(NamedTuple):
    """One changed figure of a profile: its field and value, and for display its name and the old and new value."""

    field: str
    value: Any
    what: str
    before: str
    now: str


def calibrate(paths: Sequence[Path], device: str | None = None) -> Iterator[tuple[DeviceProfile, Path, FigureChange]]:
    """Write the profiles of all devices in the files; yield each change, with the new profile and its path.

    `device` is the profile of what was measured on machines without one.
    """
    found: dict[str, dict[Path, list[SharedMeasurement]]] = {}
    for path in paths:
        for one in read_shared(path).measurements:
            if one.device is not None and device not in (None, one.device):
                raise InvalidInput(f"--device {device}: {path} was measured on {one.device}; leave it out")
            name = one.device or device
            if name is None:
                raise InvalidInput(f"{path}: was measured on a machine without a profile; name one with --device")
            found.setdefault(name, {}).setdefault(path, []).append(one)
    import yaml

    ready = []
    for name, measured in found.items():
        profile = load_profile(name)
        changes = list(_changes(profile, measured))
        changed = profile.model_copy(update={each.field: each.value for each in changes})
        DeviceProfile.model_validate_json(changed.model_dump_json())  # refuses contradictions before it is written
        ready.append((changed, changes))
    for changed, changes in ready:
        place = user_profiles() / f"{changed.name}.yaml"
        body = changed.model_dump(mode="json", exclude_none=True)
        write_file(place, yaml.safe_dump(body, sort_keys=False, allow_unicode=True).encode())
        yield from ((changed, place, each) for each in changes)


def _changes(profile: DeviceProfile, measured: Mapping[Path, Sequence[SharedMeasurement]]) -> Iterator[FigureChange]:
    source = f"measured: {', '.join(path.stem for path in measured)}"
    every = [(path, one) for path, ones in measured.items() for one in ones]
    engines, bases = dict(profile.engines), dict(profile.runtime_base)
    for path, one in every:
        target, _, backend = one.engine.partition(".")
        if backend not in profile.targets.get(target, (backend,)):  # another package's target is not listed
            raise InvalidInput(f"{path}: {one.engine} does not run on {profile.name}; correct `engine` or `device`")
        read = max(case.step_bytes * case.decode_tokens_per_s[2] for case in one.cases) / 1e9
        if read > profile.peak_bandwidth_gb_s.value:
            most = f"the memory of {profile.name} gives {profile.peak_bandwidth_gb_s.value:g}"
            raise InvalidInput(f"{path}: {read:.3g} GB/s were read, and {most}; correct `device`, or measure again")
        if (used := one.private_bytes or 0) > profile.ram.value:
            raise InvalidInput(f"{path}: private_bytes {show_bytes(used)} is more than {profile.name} has; remove it")
    for engine in dict.fromkeys(one.engine for _, one in every):
        own = [one for _, one in every if one.engine == engine]
        before = profile.engine_figures(*engine.split("."))[0].value
        bandwidth, layer, spread = _fitted(own, profile.peak_bandwidth_gb_s.value, source)
        engines = {**engines, engine: EngineFigures(bandwidth_gb_s=bandwidth, layer_ms=layer, spread=spread)}
        low, high = (bandwidth.value * each for each in spread)
        now = f"{bandwidth.value:.3g} GB/s ({low:.3g} to {high:.3g})"
        yield FigureChange("engines", engines, f"{engine} bandwidth", f"{before:g}", now)
        known = [one.runtime_bytes for one in own if one.runtime_bytes]
        if known:  # the least: a larger model's memory beyond its prediction is not the runtime's
            was = show_bytes(bases[engine].value) if engine in bases else "the target's"
            bases = {**bases, engine: SourcedBytes(value=min(known), source=source, confidence="measured")}
            yield FigureChange("runtime_base", bases, f"{engine} runtime before any model", was, show_bytes(min(known)))
    private = max(one.private_bytes or 0 for _, one in every)
    yield from _app_memory(profile, private, max(one.peak_bytes or 0 for _, one in every), source)


def _fitted(
    measured: Sequence[SharedMeasurement], peak_gb_s: float, source: str
) -> tuple[SourcedNumber, SourcedNumber, Spread]:
    """Fit a bandwidth and, where models differ enough, a time for each layer; the spread is what the fit leaves."""
    points = [(case.step_bytes, one.layers, case.decode_tokens_per_s) for one in measured for case in one.cases]
    each_layer = [size / layers for size, layers, _ in points]
    byte_s, layer_s = median(1 / (size * rate[1]) for size, _, rate in points), 0.0
    if max(each_layer) >= 2 * min(each_layer):  # least squares of shares of a step
        rows = [(size * rate[1], layers * rate[1]) for size, layers, rate in points]
        sizes, counts = (sum(each) for each in zip(*rows, strict=True))
        both = sum(size * count for size, count in rows)
        size_2, count_2 = sum(size**2 for size, _ in rows), sum(count**2 for _, count in rows)
        divisor = size_2 * count_2 - both**2
        per_byte, per_layer = (sizes * count_2 - counts * both) / divisor, (counts * size_2 - sizes * both) / divisor
        if per_layer > 0 and per_byte * peak_gb_s * 1e9 >= 1:
            byte_s, layer_s = per_byte, per_layer
    steps = [(rate, size * byte_s + layers * layer_s) for size, layers, rate in points]
    low, high = min(rate[0] * step for rate, step in steps), max(rate[2] * step for rate, step in steps)
    return (
        SourcedNumber(value=round(1 / byte_s / 1e9, 3), source=source, confidence="measured"),
        SourcedNumber(value=max(layer_s * 1000, _IN_BANDWIDTH_MS), source=source, confidence="measured"),
        (round(min(low, _NARROWEST[0]), 3), round(max(high, _NARROWEST[1]), 3)),
    )


def _app_memory(profile: DeviceProfile, private: int, peak: int, source: str) -> Iterator[FigureChange]:
    """Yield a higher limit if an app used more memory than the profile allows."""
    budget = profile.budget()
    covering = [one for one in profile.app_limits if one.entitlement is None and one.covers(profile.os_version)]
    if covering:
        limit = max(covering, key=lambda one: one.limit.value)
        used = private if limit.counts == "private" else peak
        if limit.limit.value < used <= profile.ram.value:
            more = limit.model_copy(update={"limit": SourcedBytes(value=used, source=source, confidence="measured")})
            limits = tuple(more if one is limit else one for one in profile.app_limits)
            now = f"{show_bytes(used)} and maybe more"
            yield FigureChange("app_limits", limits, "one app", show_bytes(limit.limit.value), now)
    elif profile.vram is None and budget.private_bytes < private < profile.ram.value:
        kept = SourcedBytes(value=profile.ram.value - private, source=source, confidence="measured")
        yield FigureChange(
            "reserve", kept, "kept from apps", show_bytes(profile.reserve.value), f"{show_bytes(kept.value)} at most"
        )
