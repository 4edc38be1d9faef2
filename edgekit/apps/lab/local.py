"""The lab's own machine as a device; each measurement runs in a new process group."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from edgekit import load_profile, open_artifact
from edgekit.apps.bench import Measurement, read_workload
from edgekit.apps.lab.devices import DeviceSpec, read_measurement
from edgekit.apps.lab.programs import Programs, exit_error, lease
from edgekit.errors import DeviceUnreachable, InvalidInput


class LocalDevice:
    """Runs `edgekit bench` on this machine, one measurement at a time, even under different device names."""

    def __init__(self, spec: DeviceSpec, profiles: Sequence[Path] = ()) -> None:
        if spec.address is not None:
            raise InvalidInput(f"{spec.name}: a local device has no address; leave it out")
        spec.check_options({"loads": int, "python": str, "repeats": int})
        self.name, self.spec, self.profile = spec.name, spec, load_profile(spec.profile, profiles)
        self._python = str(spec.options.get("python", sys.executable))
        self._programs = Programs(spec.name)
        self._lease: int | None = None

    def ping(self, *, timeout_s: float) -> str:
        return self._run([self._python, "-m", "edgekit", "--version"], timeout_s).decode("utf-8", "replace").strip()

    @contextmanager
    def acquire(self, *, timeout_s: float) -> Iterator[None]:
        with lease("this machine", self.name, timeout_s) as self._lease:
            try:
                yield
            finally:
                self._lease = None

    def measure(self, artifact: Path, workload: Path, *, timeout_s: float) -> Measurement:
        command = [self._python, "-m", "edgekit", "bench", str(artifact), "-w", str(workload), "--json"]
        command += self.spec.bench_options
        answer = self._run(command, timeout_s)
        return read_measurement(
            answer,
            who=self.name,
            artifact_sha256=open_artifact(artifact).sha256,
            workload_sha256=self.spec.asked(read_workload(workload)).sha256,
        )

    def stop(self) -> None:
        self._programs.stop()

    def _run(self, command: list[str], timeout_s: float) -> bytes:
        environment = {**os.environ, **self.spec.environment}
        ended = self._programs.run(
            command, timeout_s, environment=environment, on_start=self._limit, lease_fd=self._lease
        )
        if ended.code < 0:
            raise DeviceUnreachable(f"{self.name}: the program was ended by {signal.Signals(-ended.code).name}")
        # 4: measured, but every trial was disturbed.
        if ended.code not in (0, 4):
            raise exit_error(self.name, ended)
        return ended.answer

    def _limit(self, process: int) -> None:
        most = self.spec.limits.memory_bytes
        if most is not None:
            if sys.platform != "linux":
                raise InvalidInput(f"{self.name}: memory_bytes can be enforced on Linux only; leave it out here")
            import resource

            resource.prlimit(process, resource.RLIMIT_DATA, (most, most))
