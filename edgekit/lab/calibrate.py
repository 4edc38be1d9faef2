"""What a run measured of a device goes back into its profile, as an overlay in the user's own folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from edgekit.device import Number
from edgekit.errors import InvalidInput
from edgekit.files import write_file
from edgekit.lab.store import Store
from edgekit.profiles import THIS, THIS_CPU, load_profile, user_folder


def calibrate(store: Store, run: str, profiles: Sequence[Path] = ()) -> dict[str, tuple[Path, float, float]]:
    """For each device profile: the overlay that was written, and the usable bandwidth before and now, in GB/s."""
    import yaml

    seen: dict[str, list[float]] = {}
    lab = store.lab(run)
    names = {device.name: device.profile for device in lab.devices}
    for cell, _ in store.cells(run):
        found = store.result(run, cell.id)
        if found is None or found.status != "valid":
            continue
        for case in found.cases:
            speed = case.summary.get("decode_tokens_per_s")
            if speed is not None and case.bytes_per_token:
                seen.setdefault(names[cell.device], []).append(case.bytes_per_token * speed.median / 1e9)
    written = {}
    for name, reached in seen.items():
        if name in (THIS, THIS_CPU):
            continue  # detected afresh each time, from this machine's own measurements
        profile = load_profile(name, profiles)
        before, now = profile.usable_bandwidth_gb_s.value, median(reached)
        source = f"measured: {run}"
        peak = profile.peak_bandwidth_gb_s
        changed = profile.model_copy(
            update={
                "usable_bandwidth_gb_s": Number(value=round(now, 2), source=source, confidence="measured"),
                "peak_bandwidth_gb_s": peak if now <= peak.value else peak.model_copy(update={"value": round(now, 2)}),
            }
        )
        path = user_folder() / f"{profile.name}.yaml"
        text = yaml.safe_dump(changed.model_dump(mode="json", exclude_none=True), sort_keys=False, allow_unicode=True)
        write_file(path, text.encode())
        written[name] = (path, before, now)
    if not written:
        raise InvalidInput(f"{run}: no device with a profile of its own gave a valid measurement; nothing was written")
    return written
