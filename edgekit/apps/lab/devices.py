"""Devices of a lab: their description in the lab file, and the protocol for measuring on them. Answers are untrusted.

A kind of device is looked up by name: built-in kinds are modules of this package, others come from the entry points
`edgekit.devices`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import Field, ValidationError, field_validator

from edgekit import DeviceProfile
from edgekit.apps.bench import Measurement, Workload
from edgekit.common.base import Frozen
from edgekit.errors import DeviceFailed, InvalidInput, UnknownName, WorkloadFailed, quote_short

DEVICES = "edgekit.devices"
BUILT_IN = {
    "adb": "edgekit.apps.lab.adb:AdbDevice",
    "local": "edgekit.apps.lab.local:LocalDevice",
    "ssh": "edgekit.apps.lab.ssh:SshDevice",
}
MAX_ANSWER_BYTES = 64 << 20

LabName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
_Seconds = Annotated[float, Field(gt=0, le=7 * 86400, allow_inf_nan=False)]


class DeviceLimits(Frozen):
    """The limits of a measurement on a device."""

    memory_bytes: Annotated[int, Field(gt=0)] | None = None
    timeout_s: _Seconds | None = None  # instead of the predicted one
    cool_down_s: Annotated[float, Field(ge=0, le=3600)] = 60.0  # after a throttled trial


class DeviceSpec(Frozen):
    """One machine in a lab's file."""

    name: LabName
    kind: LabName
    profile: Annotated[str, Field(max_length=400)] = "this"
    address: Annotated[str, Field(max_length=400)] | None = None
    environment: dict[LabName, Annotated[str, Field(max_length=4000)]] = Field(default_factory=dict)
    limits: DeviceLimits = DeviceLimits()
    prepare: Annotated[str, Field(max_length=4000)] | None = None  # a shell command, before the first measurement
    options: dict[LabName, str | int | float | bool] = Field(default_factory=dict)

    @field_validator("address")
    @classmethod
    def _is_no_option(cls, address: str | None) -> str | None:
        if address is not None and re.search(r"^-|[\x00-\x20]", address):
            raise ValueError("an address begins with no dash and holds no blanks")
        return address

    def asked(self, workload: Workload) -> Workload:
        """Return the workload as the device runs it, with its own number of repeats."""
        repeats = self.options.get("repeats")
        return workload.repeated(repeats if isinstance(repeats, int) else None)

    @property
    def bench_options(self) -> list[str]:
        """The options of `edgekit bench` on the device."""
        return [f"--{name}={self.options[name]}" for name in ("repeats", "loads") if name in self.options]

    def check_options(self, known: Mapping[str, type]) -> None:
        """Raise `InvalidInput` for an option that this kind of device lacks, or a value of the wrong type."""
        for name, value in self.options.items():
            if name not in known or type(value) is not known[name]:
                raise InvalidInput(
                    f"{self.name}: option {quote_short(name)}: known are "
                    f"{', '.join(f'{each} ({kind.__name__})' for each, kind in sorted(known.items()))}"
                )


class LabDevice(Protocol):
    """A machine on which measurements run: `Device` of the contracts, with `ping`."""

    name: str
    profile: DeviceProfile

    def ping(self, *, timeout_s: float) -> str:
        """Return one line about the machine. Raises `DeviceFailed` if it does not answer."""

    def acquire(self, *, timeout_s: float) -> AbstractContextManager[None]: ...

    def measure(self, artifact: Path, workload: Path, *, timeout_s: float) -> Measurement:
        """Measure. A lost machine raises `DeviceUnreachable` or `DeviceTimeout`, an invalid answer `WorkloadFailed`."""

    def stop(self) -> None:
        """End the running program, from any thread; the waiting call raises `DeviceUnreachable`."""


def kinds() -> list[str]:
    """Return the names of all installed kinds of device."""
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=DEVICES))})


def connect(spec: DeviceSpec, profiles: Sequence[Path] = ()) -> LabDevice:
    """Make the device of `spec`. Imports its kind, but does not contact the machine yet."""
    entries = list(entry_points(group=DEVICES, name=spec.kind))
    try:
        if spec.kind in BUILT_IN:
            module, _, name = BUILT_IN[spec.kind].partition(":")
            make = getattr(importlib.import_module(module), name)
        elif entries:
            make = entries[0].load()
        else:
            raise UnknownName("kind of device", spec.kind, kinds())
    except ImportError as error:
        raise DeviceFailed(f"{spec.name}: kind {spec.kind} cannot be loaded: {error}; install what it needs") from error
    if spec.prepare is not None and not getattr(make, "can_prepare", False):
        raise InvalidInput(f"{spec.name}: kind {spec.kind} runs no command before it measures; leave `prepare` out")
    device: LabDevice = make(spec, profiles)
    return device


def read_measurement(answer: bytes, *, who: str, artifact_sha256: str, workload_sha256: str) -> Measurement:
    """Parse the measurement in the output of `edgekit bench --json`; it must be of this artifact and workload."""
    if len(answer) > MAX_ANSWER_BYTES:
        raise WorkloadFailed(f"{who}: answered {len(answer):,} bytes; at most {MAX_ANSWER_BYTES:,} are read")
    lines = [line for line in answer.splitlines() if line.strip()]
    if len(lines) != 1:
        raise WorkloadFailed(f"{who}: answered {len(lines)} lines instead of one measurement")
    try:
        measurement = Measurement.model_validate_json(lines[0])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the answer"
        raise WorkloadFailed(
            f"{who}: answered no measurement: {quote_short(where)}: {quote_short(first['msg'])}"
        ) from error
    for what, expected, answered in (
        ("artifact", artifact_sha256, measurement.subject.artifact_sha256),
        ("workload", workload_sha256, measurement.workload_sha256),
    ):
        if expected != answered:
            raise WorkloadFailed(
                f"{who}: measured another {what}: {quote_short(answered)}, and {quote_short(expected)} was asked for"
            )
    return measurement
