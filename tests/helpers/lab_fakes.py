"""A lab without machines: devices that answer as they are told, and labs over artifacts of the fake target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from measured import fake, measurement

from edgekit.apps.bench.measurement import Measurement
from edgekit.apps.bench.workload import read_workload
from edgekit.apps.lab.devices import DeviceLimits, DeviceSpec
from edgekit.apps.lab.matrix import Lab, entries_of
from edgekit.apps.lab.run import Clock, new_run
from edgekit.apps.lab.store import LabStore
from edgekit.artifact.artifact import open_artifact
from edgekit.device.load import load_profile
from edgekit.errors import DeviceUnreachable

QUICK = Clock(back_off_s=0.0)
Answer = Callable[["FakeDevice", int], Measurement | None]


class FakeDevice:
    """Answers with made-up measurements; `answers` may raise or answer otherwise, by the number of the call."""

    def __init__(self, spec: DeviceSpec, profiles: Sequence[Path] = (), answer: Answer | None = None) -> None:
        self.name, self.spec, self.profile = spec.name, spec, load_profile("raspberry-pi-5-8gb")
        self._answer, self.calls, self.asked = answer, 0, Counter[tuple[str, str]]()
        self.stopped = Event()
        self.most_at_once = self._at_once = 0

    def ping(self, *, timeout_s: float) -> str:
        return "a fake"

    @contextmanager
    def acquire(self, *, timeout_s: float) -> Iterator[None]:
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        yield
        self._at_once -= 1

    def measure(self, artifact: Path, workload: Path, *, timeout_s: float) -> Measurement:
        self.calls += 1
        self.asked[artifact.name, str(workload)] += 1
        found = self._answer(self, self.calls) if self._answer else None
        return found or self.usual(artifact, str(workload))

    def usual(self, artifact: Path, workload: str, speed: float = 100.0, **known: Any) -> Measurement:
        speeds = [speed * (1 + part / 1000) for part in range(-2, 3)]
        made = measurement(speeds, workload=workload, **known)
        subject = made.subject.model_copy(update={"artifact_sha256": open_artifact(artifact).sha256})
        return made.model_copy(update={"subject": subject, "workload_sha256": read_workload(workload).sha256})

    def stop(self) -> None:
        self.stopped.set()


def lost(device: FakeDevice, call: int) -> None:
    raise DeviceUnreachable(f"{device.name}: gone")


def lab_of(folder: Path, devices: int = 2, *, repeats: int = 1, **known: Any) -> Lab:
    """Two artifacts and two workloads on that many devices."""
    artifacts = [folder / name for name in ("one", "two")]
    for seed, path in enumerate(artifacts):
        if not path.exists():
            fake(path, seed=seed)
    return Lab(
        name="a-lab",
        devices=tuple(
            DeviceSpec(name=f"device-{number}", kind="fake", limits=DeviceLimits(cool_down_s=0.0))
            for number in range(devices)
        ),
        artifacts=tuple(map(str, artifacts)),
        workloads=("quick", "chat"),
        repeats=repeats,
        **known,
    )


def begun(store: LabStore, lab: Lab, now: float = 1000.0) -> str:
    run = new_run()
    store.begin(run, lab, entries_of(lab, {device.name: [*map(Path, lab.artifacts)] for device in lab.devices}), now)
    return run


def fakes(lab: Lab, **answers: Answer) -> dict[str, FakeDevice]:
    """`device_0=` and so on says how that device answers."""
    return {spec.name: FakeDevice(spec, (), answers.get(spec.name.replace("-", "_"))) for spec in lab.devices}


def complete(store: LabStore, run: str) -> None:
    """Check that every cell has one result, of its own artifact and workload, and that the run has ended."""
    info = store.info(run)
    assert set(info.states) == {"done"} and info.ended_at is not None
    for entry, _ in store.entries(run):
        found = store.result(run, entry.id)
        assert found is not None
        assert (found.subject.artifact_sha256, found.workload_sha256) == (entry.artifact_sha256, entry.workload_sha256)
    measured = [one.entry for one in store.attempts(run) if one.outcome == "measured"]
    assert len(measured) == len(set(measured))
