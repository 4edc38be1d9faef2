"""What a run measured of its devices goes back into their profiles, as overlays in the user's own folder.

Only what was seen is written: the bandwidth that decoding reached, what a runtime takes before any model, and how much
one app had where the profile says that it may not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from edgekit.device import AppLimit, Bytes, DeviceProfile, Number
from edgekit.errors import InvalidInput
from edgekit.files import write_file
from edgekit.lab.store import Store
from edgekit.measure.measurement import Measurement
from edgekit.plan import Plan
from edgekit.profiles import THIS, THIS_CPU, load_profile, user_folder
from edgekit.units import show_bytes

_RUNTIME = "runtime and private weights"  # as a runtime's account of its memory names them


class Written(NamedTuple):
    """One figure of a profile, as it was and as it is now."""

    profile: str
    path: Path
    what: str
    before: str
    now: str


class _Seen:
    """What the valid measurements of one profile's devices told."""

    def __init__(self) -> None:
        self.bandwidths: list[float] = []
        self.bases: dict[str, list[int]] = {}
        self.private_bytes = self.total_bytes = 0

    def add(self, found: Measurement, plan: Plan | None) -> None:
        for case in found.cases:
            speed = case.summary.get("decode_tokens_per_s")
            if speed is not None and case.bytes_per_token:
                self.bandwidths.append(case.bytes_per_token * speed.median / 1e9)
        self.private_bytes = max(self.private_bytes, found.memory.anonymous_bytes or 0)
        self.total_bytes = max(self.total_bytes, found.memory.peak_bytes or 0)
        taken = next((one.measured_bytes for one in found.memory.classes if one.name == _RUNTIME), None)
        if plan is not None and taken is not None:
            model = plan.estimate.private_weights_bytes + plan.memory.layer_bytes * len(plan.model.layers)
            if taken > model:
                self.bases.setdefault(f"{plan.target}.{plan.backend}", []).append(taken - model)


def calibrate(store: Store, run: str, profiles: Sequence[Path] = ()) -> list[Written]:
    """Every figure that was written, profile by profile."""
    seen: dict[str, _Seen] = {}
    names = {device.name: device.profile for device in store.lab(run).devices}
    for cell, _ in store.cells(run):
        found = store.result(run, cell.id)
        name = names[cell.device]
        # `this` is detected afresh each time, from this machine's own measurements.
        if found is None or found.status != "valid" or name in (THIS, THIS_CPU):
            continue
        seen.setdefault(name, _Seen()).add(found, store.plan(cell.artifact_sha256))
    written: list[Written] = []
    for name, one in seen.items():
        written += _overlaid(load_profile(name, profiles), one, f"measured: {run}")
    if not written:
        raise InvalidInput(f"{run}: no device with a profile of its own gave a valid measurement; nothing was written")
    return written


def _overlaid(profile: DeviceProfile, seen: _Seen, source: str) -> list[Written]:
    import yaml

    changes = list(_changes(profile, seen, source))
    changed = profile.model_copy(update={field: value for field, value, *_ in changes})
    body = changed.model_dump(mode="json", exclude_none=True)
    DeviceProfile.model_validate_json(changed.model_dump_json())  # what contradicts itself is refused, not written
    path = user_folder() / f"{profile.name}.yaml"
    if changes:
        write_file(path, yaml.safe_dump(body, sort_keys=False, allow_unicode=True).encode())
    return [Written(profile.name, path, what, before, now) for _, _, what, before, now in changes if what]


def _changes(profile: DeviceProfile, seen: _Seen, source: str) -> Iterator[tuple[str, Any, str, str, str]]:
    """Field, value, and the words for it: what, before, now."""
    if seen.bandwidths:
        before, now = profile.usable_bandwidth_gb_s.value, round(median(seen.bandwidths), 2)
        peak = profile.peak_bandwidth_gb_s
        if now > peak.value:
            yield "peak_bandwidth_gb_s", peak.model_copy(update={"value": now}), "", "", ""
        number = Number(value=now, source=source, confidence="measured")
        yield "usable_bandwidth_gb_s", number, "usable bandwidth", f"{before:g}", f"{now:.3g} GB/s"
    if seen.bases:
        # The smallest: what a larger model took beyond its prediction is not the runtime's.
        bases = {
            name: Bytes(value=min(all_of), source=source, confidence="measured") for name, all_of in seen.bases.items()
        }
        known = profile.runtime_base
        said = ", ".join(f"{name} {show_bytes(base.value)}" for name, base in bases.items())
        was = ", ".join(f"{name} {show_bytes(known[name].value)}" for name in bases if name in known) or "the target's"
        yield "runtime_base", {**known, **bases}, "runtime before any model", was, said
    yield from _room(profile, seen, source)


def _room(profile: DeviceProfile, seen: _Seen, source: str) -> Iterator[tuple[str, Any, str, str, str]]:
    """One app had more than the profile allows: the limit is at least that, or less is kept from it."""
    budget = profile.budget()
    covering = [one for one in profile.app_limits if one.entitlement is None and one.covers(profile.os_version)]
    if covering:
        limit = max(covering, key=lambda one: one.limit.value)
        had = seen.private_bytes if limit.counts == "private" else seen.total_bytes
        if limit.limit.value < had <= profile.ram.value:
            more = limit.model_copy(update={"limit": Bytes(value=had, source=source, confidence="measured")})
            limits: tuple[AppLimit, ...] = tuple(more if one is limit else one for one in profile.app_limits)
            yield "app_limits", limits, "one app", show_bytes(limit.limit.value), f"{show_bytes(had)} and maybe more"
    elif profile.vram is None and budget.private_bytes < seen.private_bytes < profile.ram.value:
        kept = profile.ram.value - seen.private_bytes
        now = Bytes(value=kept, source=source, confidence="measured")
        yield "reserve", now, "kept from apps", show_bytes(profile.reserve.value), f"{show_bytes(kept)} at most"
