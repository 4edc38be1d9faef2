"""Writes measured figures into profiles of the user's, from files of `bench --share` and `lab share`.

An engine's bandwidth, the memory of its runtime before any model, and the memory that an app had beyond the profile's
limit are written, each with the files as its source. Plans predict by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from edgekit.common.files import user_profiles, write_file
from edgekit.common.parsing import validate
from edgekit.common.units import show_bytes
from edgekit.contracts.device import DeviceProfile, EngineFigures, SourcedBytes, SourcedNumber
from edgekit.contracts.shared_measurement import SharedMeasurement, read_shared
from edgekit.device.load import load_profile
from edgekit.errors import InvalidInput

_NARROWEST = (0.9, 1.1)  # what is timed on one machine repeats within this
_IN_BANDWIDTH_MS = 1e-6  # as good as none


def calibrate(paths: Sequence[Path], device: str | None = None) -> list[str]:
    """Write the profiles of all devices in the files, or none; return a line for each changed figure.

    `device` is the profile of what was measured on machines without one.
    """
    import yaml

    found: dict[str, dict[Path, tuple[SharedMeasurement, ...]]] = {}
    for path in paths:
        for one in read_shared(path).measurements:
            if one.device is not None and device not in (None, one.device):
                raise InvalidInput(f"--device {device}: {path} was measured on {one.device}; leave it out")
            name = one.device or device
            if name is None:
                raise InvalidInput(f"{path}: was measured on a machine without a profile; name one with --device")
            of_device = found.setdefault(name, {})
            of_device[path] = (*of_device.get(path, ()), one)
    written, lines = {}, []
    for name, measured in found.items():
        profile = load_profile(name)
        place = user_profiles() / f"{profile.name}.yaml"
        changes = list(_changes(profile, measured))
        changed = profile.model_copy(update={field: value for field, value, _ in changes})
        validate(changed.model_dump_json(), DeviceProfile, f"{name}, calibrated")  # before it is written
        body = changed.model_dump(mode="json", exclude_none=True)
        written[place] = yaml.safe_dump(body, sort_keys=False, allow_unicode=True).encode()
        lines += [f"{profile.name}: {change}, in {place}" for _, _, change in changes]
    for place, text in written.items():
        write_file(place, text)
    return lines


def _changes(
    profile: DeviceProfile, measured: Mapping[Path, Sequence[SharedMeasurement]]
) -> Iterator[tuple[str, Any, str]]:
    """Yield every change: its field and value, and a line with the old and the new value."""
    source = f"measured: {', '.join(path.stem for path in measured)}"
    peak, every = profile.peak_bandwidth_gb_s.value, [(path, one) for path, ones in measured.items() for one in ones]
    engines, bases = dict(profile.engines), dict(profile.runtime_base)
    for path, one in every:
        target, _, backend = one.engine.partition(".")
        if backend not in profile.targets.get(target, (backend,)):  # another package's target is not listed
            raise InvalidInput(f"{path}: {one.engine} does not run on {profile.name}; correct `engine` or `device`")
        read = max(case.step_bytes * case.decode_tokens_per_s[2] for case in one.cases) / 1e9
        if read > peak:
            most = f"the memory of {profile.name} gives {peak:g}"
            raise InvalidInput(f"{path}: {read:.3g} GB/s were read, and {most}; correct `device`, or measure again")
        if (used := one.private_bytes or 0) > profile.ram.value:
            raise InvalidInput(f"{path}: private_bytes {show_bytes(used)} is more than {profile.name} has; remove it")
    for engine in dict.fromkeys(one.engine for _, one in every):
        own = [one for _, one in every if one.engine == engine]
        before = profile.engine_figures(*engine.split("."))[0].value
        gb_s, layer_ms, spread = _fitted(own, peak)
        bandwidth, layer = (
            SourcedNumber(value=value, source=source, confidence="measured") for value in (gb_s, layer_ms)
        )
        engines = {**engines, engine: EngineFigures(bandwidth_gb_s=bandwidth, layer_ms=layer, spread=spread)}
        now = f"{gb_s:.3g} GB/s ({gb_s * spread[0]:.3g} to {gb_s * spread[1]:.3g})"
        yield "engines", engines, f"{engine} bandwidth {before:g} → {now}"
        known = [one.runtime_bytes for one in own if one.runtime_bytes]
        if known:  # the least: a larger model's memory beyond its prediction is not the runtime's
            was = show_bytes(bases[engine].value) if engine in bases else "the target's"
            bases = {**bases, engine: SourcedBytes(value=min(known), source=source, confidence="measured")}
            yield "runtime_base", bases, f"{engine} runtime before any model {was} → {show_bytes(min(known))}"
    private, resident = (max(getattr(one, name) or 0 for _, one in every) for name in ("private_bytes", "peak_bytes"))
    yield from _app_memory(profile, private, resident, source)


def _fitted(measured: Sequence[SharedMeasurement], peak_gb_s: float) -> tuple[float, float, tuple[float, float]]:
    """Fit GB/s and, where models differ enough, milliseconds of a layer; the spread is what the fit leaves."""
    import numpy as np

    points = [(case.step_bytes / 1e9, one.layers, case.decode_tokens_per_s) for one in measured for case in one.cases]
    each_layer = [size / layers for size, layers, _ in points]
    per_gb, per_layer = median(1 / (size * rates[1]) for size, _, rates in points), 0.0
    if max(each_layer) >= 2 * min(each_layer):
        shares = np.array([(size * rates[1], layers * rates[1]) for size, layers, rates in points])  # of a step
        fitted = np.linalg.lstsq(shares, np.ones(len(points)), rcond=None)[0].tolist()
        if fitted[1] > 0 and fitted[0] * peak_gb_s >= 1:
            per_gb, per_layer = fitted
    steps = [(rates, size * per_gb + layers * per_layer) for size, layers, rates in points]
    low, high = min(rates[0] * step for rates, step in steps), max(rates[2] * step for rates, step in steps)
    found = (
        1 / per_gb,
        max(per_layer * 1000, _IN_BANDWIDTH_MS),
        min(low, _NARROWEST[0]),
        min(max(high, _NARROWEST[1]), 100),
    )
    gb_s, layer_ms, least, most = (float(f"{each:.4g}") for each in found)
    return gb_s, layer_ms, (least, most)


def _app_memory(profile: DeviceProfile, private: int, resident: int, source: str) -> Iterator[tuple[str, Any, str]]:
    """Yield a higher limit if an app used more memory than the profile allows."""
    covering = [one for one in profile.app_limits if one.entitlement is None and one.covers(profile.os_version)]
    if covering:
        limit = max(covering, key=lambda one: one.limit.value)
        used = private if limit.counts == "private" else resident
        if limit.limit.value < used <= profile.ram.value:
            more = limit.model_copy(update={"limit": SourcedBytes(value=used, source=source, confidence="measured")})
            limits = tuple(more if one is limit else one for one in profile.app_limits)
            was = show_bytes(limit.limit.value)
            yield "app_limits", limits, f"one app {was} → {show_bytes(used)} and maybe more"
    elif profile.vram is None and profile.budget().private_bytes < private < profile.ram.value:
        kept = SourcedBytes(value=profile.ram.value - private, source=source, confidence="measured")
        was = show_bytes(profile.reserve.value)
        yield "reserve", kept, f"kept from apps {was} → {show_bytes(kept.value)} at most"
