"""The lab file, and the entries of its matrix: artifact × device × workload × repeat, each with a stable id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from edgekit import Artifact, open_artifact
from edgekit.apps.bench import LOADS, Metric, Workload, predicted_s, read_workload
from edgekit.apps.lab.devices import DeviceSpec, LabName
from edgekit.common.base import Frozen
from edgekit.common.bounds import Amount, Bytes, Count, Repeats, Sha256, Text
from edgekit.common.parsing import read_yaml

# A device counts as lost after this multiple of the predicted time, plus time for opening, warm-ups and canaries.
_PATIENCE, _OVERHEAD_S = 6.0, 300.0


class ModelEntry(Frozen):
    """A model to export for each device's profile, once per distinct plan."""

    model: Annotated[str, Field(max_length=400)]
    recipe: Annotated[str, Field(max_length=400)] | None = None
    context: Annotated[int, Field(gt=0)] | None = None


class Threshold(Frozen):
    """The largest loss against the baseline that does not fail the build."""

    metric: Metric
    worse_by: Annotated[float, Field(ge=0, le=10)] = 0.05


class Lab(Frozen):
    """The content of a lab.yaml."""

    version: Literal[1] = 1
    name: LabName
    devices: Annotated[tuple[DeviceSpec, ...], Field(min_length=1, max_length=1000)]
    artifacts: tuple[Annotated[str, Field(max_length=400)], ...] = ()
    models: tuple[ModelEntry, ...] = ()
    workloads: Annotated[tuple[Annotated[str, Field(max_length=400)], ...], Field(min_length=1, max_length=100)]
    repeats: Repeats = 1
    thresholds: tuple[Threshold, ...] = (Threshold(metric="decode_tokens_per_s"),)
    baseline: LabName | None = None
    profiles: tuple[Annotated[str, Field(max_length=400)], ...] = ()

    @model_validator(mode="after")
    def _is_complete(self) -> Lab:
        names = [device.name for device in self.devices]
        if len(set(names)) < len(names):
            raise ValueError("two devices have the same name")
        if not self.artifacts and not self.models:
            raise ValueError("give artifacts or models: there is nothing to measure")
        return self


class MatrixEntry(Frozen):
    """One measurement to make."""

    id: Text
    device: Text
    artifact: Text  # its folder
    artifact_sha256: Sha256
    workload: Text  # a bundled name or the path of a YAML file
    workload_sha256: Sha256
    repeat: Count
    timeout_s: Amount
    predicted_bytes: Bytes | None = None
    predicted_decode_tokens_per_s: Amount | None = None
    predicted_s: Amount | None = None  # of prefill and decoding, without opening


def read_lab(path: Path) -> Lab:
    """Read a lab file; its paths are relative to its folder."""
    lab = read_yaml(path, Lab)
    folder = path.parent

    def near(name: str) -> str:
        """Resolve a workload, profile or recipe: a path if it ends in .yaml or .yml, otherwise a name."""
        return str(folder / name) if name.endswith((".yaml", ".yml")) else name

    def model_near(one: ModelEntry) -> ModelEntry:
        model = str(folder / one.model) if (folder / one.model).exists() else one.model
        return one.model_copy(update={"model": model, "recipe": near(one.recipe) if one.recipe else None})

    return lab.model_copy(
        update={
            "artifacts": tuple(str(folder / name) for name in lab.artifacts),
            "models": tuple(model_near(one) for one in lab.models),
            "workloads": tuple(near(name) for name in lab.workloads),
            "profiles": tuple(str(folder / name) for name in lab.profiles),
            "devices": tuple(
                _near(device.model_copy(update={"profile": near(device.profile)}), folder) for device in lab.devices
            ),
        }
    )


def _near(device: DeviceSpec, folder: Path) -> DeviceSpec:
    """Resolve a device's files (keys, native runner) against the lab's folder."""
    files = {
        name: str(folder / Path(value).expanduser())
        for name in ("runner", "identity", "known_hosts")
        if isinstance(value := device.options.get(name), str)
    }
    return device.model_copy(update={"options": {**device.options, **files}})


def entries_of(lab: Lab, artifacts: dict[str, list[Path]]) -> Iterator[MatrixEntry]:
    """Yield every entry, device by device; `artifacts` maps a device to its artifact folders."""
    workloads = [(name, read_workload(name)) for name in lab.workloads]
    opened = {path: open_artifact(path) for paths in artifacts.values() for path in paths}
    for device in lab.devices:
        for repeat in range(lab.repeats):
            for path in artifacts[device.name]:
                for name, workload in workloads:
                    yield _entry(device, opened[path], name, workload, repeat)


def _entry(device: DeviceSpec, artifact: Artifact, name: str, workload: Workload, repeat: int) -> MatrixEntry:
    plan, workload = artifact.plan, device.asked(workload)
    sha256 = workload.sha256
    key = json.dumps([device.name, artifact.sha256, sha256, repeat]).encode()
    loads = device.options.get("loads", LOADS)
    works_s = predicted_s(plan, workload, loads if isinstance(loads, int) else LOADS)
    return MatrixEntry(
        id=hashlib.sha256(key).hexdigest()[:16],
        device=device.name,
        artifact=str(artifact.folder),
        artifact_sha256=artifact.sha256,
        workload=name,
        workload_sha256=sha256,
        repeat=repeat,
        timeout_s=device.limits.timeout_s or _OVERHEAD_S + _PATIENCE * works_s,
        predicted_bytes=plan.estimate.total_bytes,
        predicted_decode_tokens_per_s=plan.speed.decode_tokens_per_s,
        predicted_s=works_s,
    )
