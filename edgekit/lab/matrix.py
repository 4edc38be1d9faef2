"""A lab's file, and the cells that it means: artifact × device × workload × repeat, each with an id that stays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from edgekit.artifact import Artifact, open_artifact
from edgekit.frozen import Frozen
from edgekit.lab.devices import DeviceSpec, Name
from edgekit.measure.bench import LOADS
from edgekit.measure.measurement import Metric
from edgekit.measure.workload import Workload, read_workload
from edgekit.reading import read_yaml

# What a prediction is stretched by before a device counts as lost, and what opening, warm-ups and canaries may take.
_PATIENCE, _OVERHEAD_S = 6.0, 300.0


class ModelEntry(Frozen):
    """A model that is exported for each device's profile, once for each plan that differs."""

    model: Annotated[str, Field(max_length=400)]
    recipe: Annotated[str, Field(max_length=400)] | None = None
    context: Annotated[int, Field(gt=0)] | None = None


class Threshold(Frozen):
    """How much worse than the baseline a metric may become before the build fails."""

    metric: Metric
    worse_by: Annotated[float, Field(ge=0, le=10)] = 0.05


class Lab(Frozen):
    """The whole of a lab.yaml."""

    version: Literal[1] = 1
    name: Name
    devices: Annotated[tuple[DeviceSpec, ...], Field(min_length=1, max_length=1000)]
    artifacts: tuple[Annotated[str, Field(max_length=400)], ...] = ()
    models: tuple[ModelEntry, ...] = ()
    workloads: Annotated[tuple[Annotated[str, Field(max_length=400)], ...], Field(min_length=1, max_length=100)]
    repeats: Annotated[int, Field(ge=1, le=1000)] = 1
    thresholds: tuple[Threshold, ...] = (Threshold(metric="decode_tokens_per_s"),)
    baseline: Name | None = None
    profiles: tuple[Annotated[str, Field(max_length=400)], ...] = ()

    @model_validator(mode="after")
    def _is_complete(self) -> Lab:
        names = [device.name for device in self.devices]
        if len(set(names)) < len(names):
            raise ValueError("two devices have the same name")
        if not self.artifacts and not self.models:
            raise ValueError("give artifacts or models: there is nothing to measure")
        return self


class Cell(Frozen):
    """One measurement that is to be made."""

    id: str
    device: str
    artifact: str  # its folder
    artifact_sha256: str
    workload: str  # a bundled name or the path of a YAML file
    workload_sha256: str
    repeat: int
    timeout_s: float
    predicted_bytes: int | None = None
    predicted_decode_tokens_per_s: float | None = None
    predicted_s: float | None = None  # of reading and writing; opening comes on top


def read_lab(path: Path) -> Lab:
    """The lab in that file; paths in it are taken from the file's own folder."""
    lab = read_yaml(path, Lab)
    folder = path.parent

    def near(name: str) -> str:
        """A workload, profile or recipe: a file where it ends like one, else a name."""
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
    """With the files that it is reached with and prepared from, and a native runner, taken from the lab's folder."""
    files = {
        name: str(folder / Path(value).expanduser())
        for name in ("runner", "identity", "known_hosts")
        if isinstance(value := device.options.get(name), str)
    }
    device = device.model_copy(update={"options": {**device.options, **files}})
    if device.prepare is None:
        return device
    house = device.prepare.wheelhouse
    found = {"wheel": str(folder / device.prepare.wheel), "wheelhouse": str(folder / house) if house else None}
    return device.model_copy(update={"prepare": device.prepare.model_copy(update=found)})


def cells_of(lab: Lab, artifacts: dict[str, list[Path]]) -> Iterator[Cell]:
    """Every cell, device by device; `artifacts` says which folders each device measures."""
    workloads = [(name, read_workload(name)) for name in lab.workloads]
    opened = {path: open_artifact(path) for paths in artifacts.values() for path in paths}
    for device in lab.devices:
        for repeat in range(lab.repeats):
            for path in artifacts[device.name]:
                for name, workload in workloads:
                    yield _cell(device, opened[path], name, workload, repeat)


def _cell(device: DeviceSpec, artifact: Artifact, name: str, workload: Workload, repeat: int) -> Cell:
    plan = artifact.plan
    sha256 = workload.sha256
    if isinstance(repeats := device.options.get("repeats"), int):
        workload = workload.model_copy(update={"repeats": repeats})
        sha256 = workload.sha256
    key = json.dumps([device.name, artifact.sha256, sha256, repeat]).encode()
    loads = device.options.get("loads", LOADS)
    works_s = predicted_s(artifact, workload, loads if isinstance(loads, int) else LOADS)
    return Cell(
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


def predicted_s(artifact: Artifact, workload: Workload, loads: int) -> float:
    """How long the workload takes by the plan, repeats and the warm-ups of every process included."""
    speed = artifact.plan.speed
    read = written = 0
    for case in workload.cases:
        for request in case.requests:
            read += sum(part.tokens or len(part.text or "") // 3 for part in request.prompt)
            written += request.output_tokens
    once = written / max(speed.decode_tokens_per_s, 1e-3) + read / max(speed.prefill_tokens_per_s or 1.0, 1e-3)
    return once * (workload.warmups * min(loads, workload.repeats) + workload.repeats)
