"""Writes a run's measured figures into profile overlays in the user's folder.

These figures are written: the bandwidth that decoding reached, the memory of a runtime before any model, and the
memory that an app used beyond the profile's limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from edgekit import DeviceProfile, Plan, load_profile
from edgekit.apps.bench import Measurement
from edgekit.apps.lab.store import LabStore
from edgekit.common.files import user_profiles, write_file
from edgekit.common.units import show_bytes
from edgekit.contracts.device import THIS, THIS_CPU, AppLimit, SourcedBytes, SourcedNumber
from edgekit.errors import InvalidInput

_RUNTIME = "runtime and private weights"  # the name of the class in memory reports


class FigureChange(NamedTuple):
    """One changed figure of a profile: the old and the new value."""

    profile: str
    path: Path
    what: str
    before: str
    now: str


class _Figures:
    """The figures of one profile's devices from valid measurements."""

    def __init__(self) -> None:
        self.bandwidths: list[float] = []
        self.bases: dict[str, list[int]] = {}
        self.private_bytes = self.total_bytes = 0

    def add(self, measurement: Measurement, plan: Plan | None) -> None:
        for case in measurement.cases:
            speed = case.summary.get("decode_tokens_per_s")
            if speed is not None and case.bytes_per_token:
                self.bandwidths.append(case.bytes_per_token * speed.median / 1e9)
        self.private_bytes = max(self.private_bytes, measurement.memory.anonymous_bytes or 0)
        self.total_bytes = max(self.total_bytes, measurement.memory.peak_bytes or 0)
        taken_bytes = next((one.measured_bytes for one in measurement.memory.classes if one.name == _RUNTIME), None)
        if plan is not None and taken_bytes is not None:
            # The graph and the tokenizer are of the model too.
            model = plan.estimate.private_weights_bytes + plan.estimate.runtime_bytes - plan.memory.runtime_bytes
            if taken_bytes > model:
                self.bases.setdefault(f"{plan.target}.{plan.backend}", []).append(taken_bytes - model)


def calibrate(store: LabStore, run: str, profiles: Sequence[Path] = ()) -> list[FigureChange]:
    """Write the overlays of a run's profiles; return every changed figure."""
    figures: dict[str, _Figures] = {}
    names = {device.name: device.profile for device in store.lab(run).devices}
    for entry, _ in store.entries(run):
        measurement = store.result(run, entry.id)
        name = names[entry.device]
        # `this` has no file: it is detected each time.
        if measurement is None or measurement.status != "valid" or name in (THIS, THIS_CPU):
            continue
        figures.setdefault(name, _Figures()).add(measurement, store.plan(entry.artifact_sha256))
    written: list[FigureChange] = []
    for name, one in figures.items():
        written += _overlaid(load_profile(name, profiles), one, f"measured: {run}")
    if not written:
        raise InvalidInput(f"{run}: no device with its own profile has a valid measurement; nothing was written")
    return written


def _overlaid(profile: DeviceProfile, figures: _Figures, source: str) -> list[FigureChange]:
    import yaml

    changes = list(_changes(profile, figures, source))
    changed = profile.model_copy(update={field: value for field, value, *_ in changes})
    body = changed.model_dump(mode="json", exclude_none=True)
    DeviceProfile.model_validate_json(changed.model_dump_json())  # refuse contradictions before writing
    path = user_profiles() / f"{profile.name}.yaml"
    if changes:
        write_file(path, yaml.safe_dump(body, sort_keys=False, allow_unicode=True).encode())
    return [FigureChange(profile.name, path, what, before, now) for _, _, what, before, now in changes if what]


def _changes(profile: DeviceProfile, figures: _Figures, source: str) -> Iterator[tuple[str, Any, str, str, str]]:
    """Yield every change: its field and value, and for display its name, old value and new value."""
    if figures.bandwidths:
        before, now = profile.usable_bandwidth_gb_s.value, round(median(figures.bandwidths), 2)
        peak = profile.peak_bandwidth_gb_s
        if now > peak.value:
            yield "peak_bandwidth_gb_s", peak.model_copy(update={"value": now}), "", "", ""
        number = SourcedNumber(value=now, source=source, confidence="measured")
        yield "usable_bandwidth_gb_s", number, "usable bandwidth", f"{before:g}", f"{now:.3g} GB/s"
    if figures.bases:
        # The minimum: a larger model's memory beyond its prediction is not the runtime's.
        bases = {
            name: SourcedBytes(value=min(all_of), source=source, confidence="measured")
            for name, all_of in figures.bases.items()
        }
        known = profile.runtime_base
        said = ", ".join(f"{name} {show_bytes(base.value)}" for name, base in bases.items())
        was = ", ".join(f"{name} {show_bytes(known[name].value)}" for name in bases if name in known) or "the target's"
        yield "runtime_base", {**known, **bases}, "runtime before any model", was, said
    yield from _app_memory(profile, figures, source)


def _app_memory(profile: DeviceProfile, figures: _Figures, source: str) -> Iterator[tuple[str, Any, str, str, str]]:
    """Yield a higher limit if an app used more memory than the profile allows."""
    budget = profile.budget()
    covering = [one for one in profile.app_limits if one.entitlement is None and one.covers(profile.os_version)]
    if covering:
        limit = max(covering, key=lambda one: one.limit.value)
        used = figures.private_bytes if limit.counts == "private" else figures.total_bytes
        if limit.limit.value < used <= profile.ram.value:
            more = limit.model_copy(update={"limit": SourcedBytes(value=used, source=source, confidence="measured")})
            limits: tuple[AppLimit, ...] = tuple(more if one is limit else one for one in profile.app_limits)
            yield "app_limits", limits, "one app", show_bytes(limit.limit.value), f"{show_bytes(used)} and maybe more"
    elif profile.vram is None and budget.private_bytes < figures.private_bytes < profile.ram.value:
        kept = profile.ram.value - figures.private_bytes
        now = SourcedBytes(value=kept, source=source, confidence="measured")
        yield "reserve", now, "kept from apps", show_bytes(profile.reserve.value), f"{show_bytes(kept)} at most"
