"""Runs the programs of one device of the lab, under its lease, and converts their failures to the lab's errors.

A lease is exclusive among all processes of this user on this machine. The OS drops it when its process ends; a child
that inherits the file descriptor keeps it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic, sleep
from typing import NamedTuple

from edgekit.apps.lab.devices import MAX_ANSWER_BYTES
from edgekit.common.files import home
from edgekit.common.subprocesses import ProgramRunner
from edgekit.common.system import try_lock
from edgekit.errors import DeviceFailed, DeviceTimeout, DeviceUnreachable, WorkloadFailed, quote_short

_ERRORS_BYTES = 2000
_LEASE_STEP_S = 0.05
# Messages of operating systems and of `OutOfSpace`.
_DISK_FULL = ("No space left on device", "Disk quota exceeded", "make room or choose another disk")


@contextmanager
def lease(device: str, who: str, timeout_s: float) -> Iterator[int]:
    """Hold the lease of `device` during the block; yield its file descriptor, which a child may inherit."""
    ends = monotonic() + timeout_s
    folder = home() / "leases"
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / hashlib.sha256(device.encode()).hexdigest()[:32], os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while not try_lock(fd):
            if monotonic() >= ends:
                raise DeviceTimeout(
                    f"{who}: was busy for {timeout_s:g} s; another run measures on it, or a killed one left a program"
                )
            sleep(_LEASE_STEP_S)
        yield fd
    finally:
        os.close(fd)


class ProgramResult(NamedTuple):
    """A program's exit code, its stdout, and the last line of its stderr."""

    code: int
    answer: bytes
    last_line: str


class Programs:
    """The programs of one device. `stop` may be called from any thread.

    Args:
        who: the device's name, for error messages.
    """

    def __init__(self, who: str) -> None:
        self.who = who
        self._runner = ProgramRunner()

    def run(
        self,
        command: Sequence[str],
        timeout_s: float,
        *,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        on_start: Callable[[int], None] | None = None,
        lease_fd: int | None = None,
    ) -> ProgramResult:
        """Run a program to completion; all processes of its group are gone afterwards.

        The program inherits `lease_fd`, the file descriptor of a lease: if edgekit is killed, the lease lasts as long
        as the program. Raises `DeviceUnreachable`, `DeviceTimeout`, or `WorkloadFailed` for too long an answer.
        """
        if self._runner.is_stopped:
            raise DeviceUnreachable(f"{self.who}: was stopped")
        try:
            done = self._runner.run(
                command,
                timeout_s,
                limit_bytes=MAX_ANSWER_BYTES,
                errors_bytes=_ERRORS_BYTES,
                stdin=stdin,
                env=environment,
                on_start=on_start,
                inherited_fd=lease_fd,
            )
        except OSError as error:
            raise DeviceUnreachable(f"{self.who}: {command[0]} cannot be started: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise DeviceTimeout(f"{self.who}: took longer than {timeout_s:.0f} s and was ended") from error
        if len(done.output) > MAX_ANSWER_BYTES:
            raise WorkloadFailed(f"{self.who}: answered more than {MAX_ANSWER_BYTES:,} bytes, which is the limit")
        lines = done.errors.decode("utf-8", "replace").strip().splitlines()
        return ProgramResult(done.code, done.output, quote_short(lines[-1] if lines else "nothing on stderr", 300))

    def stop(self) -> None:
        """Kill the running programs; later ones are refused."""
        self._runner.stop()


def exit_error(who: str, ended: ProgramResult) -> DeviceFailed:
    """Return the error for an exit code: `WorkloadFailed`, or plain `DeviceFailed` for a full disk, which may pass."""
    if any(word in ended.last_line for word in _DISK_FULL):
        return DeviceFailed(f"{who}: its disk is full: {ended.last_line}; make room there, and continue with --resume")
    return WorkloadFailed(f"{who}: exit code {ended.code}: {ended.last_line}")
