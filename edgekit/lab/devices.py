"""What a device of the lab is: how a lab's file names it, and how it is reached. Everything it answers is untrusted.

It knows no kind but by name: built-in ones are modules beside this page, others come through `edgekit.devices`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import Field, ValidationError, field_validator

from edgekit.device import DeviceProfile
from edgekit.errors import DeviceFailed, InvalidInput, UnknownName, WorkloadFailed, clip
from edgekit.frozen import Frozen
from edgekit.measure.measurement import Measurement

DEVICES = "edgekit.devices"
BUILT_IN = {
    "adb": "edgekit.lab.adb:AdbDevice",
    "labgrid": "edgekit.lab.labgrid:LabgridDevice",
    "local": "edgekit.lab.local:LocalDevice",
    "ssh": "edgekit.lab.ssh:SshDevice",
}
MAX_ANSWER_BYTES = 64 << 20

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
_Seconds = Annotated[float, Field(gt=0, le=7 * 86400, allow_inf_nan=False)]


class DeviceLimits(Frozen):
    """What a measurement may take of a device."""

    memory_bytes: Annotated[int, Field(gt=0)] | None = None
    timeout_s: _Seconds | None = None  # instead of what is predicted
    cool_down_s: Annotated[float, Field(ge=0, le=3600)] = 60.0  # after a throttled trial


class Prepare(Frozen):
    """An environment that is made over there before anything is measured: a wheel of edgekit, and where the rest is."""

    wheel: Annotated[str, Field(max_length=400, pattern=r"\.whl$")]
    wheelhouse: Annotated[str, Field(max_length=400)] | None = None  # a folder of wheels, sent along
    index: Annotated[str, Field(max_length=400)] | None = None  # the pip of that machine knows one otherwise
    system_packages: bool = False  # what the machine's own Python has may be used
    timeout_s: _Seconds = 1800.0

    @field_validator("index")
    @classmethod
    def _is_an_address(cls, index: str | None) -> str | None:
        if index is not None and not re.fullmatch(r"(https?|file)://[A-Za-z0-9._~:/%-]+", index):
            raise ValueError("an index is an address such as https://host/simple, without a name or password in it")
        return index


class DeviceSpec(Frozen):
    """One machine, as a lab's file names it."""

    name: Name
    kind: Name
    profile: Annotated[str, Field(max_length=400)] = "this"
    address: Annotated[str, Field(max_length=400)] | None = None
    environment: dict[Name, Annotated[str, Field(max_length=4000)]] = Field(default_factory=dict)
    limits: DeviceLimits = DeviceLimits()
    prepare: Prepare | None = None
    options: dict[Name, str | int | float | bool] = Field(default_factory=dict)

    @field_validator("address")
    @classmethod
    def _is_no_option(cls, address: str | None) -> str | None:
        if address is not None and re.search(r"^-|[\x00-\x20]", address):
            raise ValueError("an address begins with no dash and holds no blanks")
        return address


class LabDevice(Protocol):
    """One machine that can be measured; `Device` of the contracts, and a word on whether it is there."""

    name: str
    profile: DeviceProfile

    def ping(self, *, timeout_s: float) -> str:
        """One line on who answers; raises `DeviceFailed` where nobody does."""

    def acquire(self, *, timeout_s: float) -> AbstractContextManager[None]: ...

    def measure(self, artifact: Path, workload: Path, *, timeout_s: float) -> Measurement:
        """Raises `DeviceUnreachable` or `DeviceTimeout` where it was lost, `WorkloadFailed` for a wrong answer."""

    def stop(self) -> None:
        """End what is running there, from any thread; whoever waits for it gets `DeviceUnreachable`."""


def kinds() -> list[str]:
    """Every kind of device that is known here."""
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=DEVICES))})


def connect(spec: DeviceSpec, profiles: Sequence[Path] = ()) -> LabDevice:
    """The device that `spec` names; its kind is imported now, and nothing is asked of the machine yet."""
    found = list(entry_points(group=DEVICES, name=spec.kind))
    try:
        if spec.kind in BUILT_IN:
            module, _, name = BUILT_IN[spec.kind].partition(":")
            make = getattr(importlib.import_module(module), name)
        elif found:
            make = found[0].load()
        else:
            raise UnknownName("kind of device", spec.kind, kinds())
    except ImportError as error:
        raise DeviceFailed(f"{spec.name}: kind {spec.kind} cannot be loaded: {error}; install what it needs") from error
    if spec.prepare is not None and not getattr(make, "can_prepare", False):
        raise InvalidInput(f"{spec.name}: kind {spec.kind} prepares no environment; leave `prepare` out")
    device: LabDevice = make(spec, profiles)
    return device


def read_measurement(answer: bytes, *, who: str, artifact_sha256: str, workload_sha256: str) -> Measurement:
    """The one measurement in what `edgekit bench --json` printed; refused where it answers another question."""
    if len(answer) > MAX_ANSWER_BYTES:
        raise WorkloadFailed(f"{who}: answered {len(answer):,} bytes; at most {MAX_ANSWER_BYTES:,} are read")
    lines = [line for line in answer.splitlines() if line.strip()]
    if len(lines) != 1:
        raise WorkloadFailed(f"{who}: answered {len(lines)} lines where one measurement was asked for")
    try:
        found = Measurement.model_validate_json(lines[0])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the answer"
        raise WorkloadFailed(f"{who}: answered no measurement: {clip(where)}: {clip(first['msg'])}") from error
    for what, asked, said in (
        ("artifact", artifact_sha256, found.arm.artifact_sha256),
        ("workload", workload_sha256, found.workload_sha256),
    ):
        if asked != said:
            raise WorkloadFailed(f"{who}: measured another {what}: {clip(said)}, and {clip(asked)} was asked for")
    return found


def environment_of(spec: DeviceSpec, given: Mapping[str, str]) -> dict[str, Any]:
    """What a program on the device sees: what is given, and what the lab's file adds."""
    return {**given, **spec.environment}
