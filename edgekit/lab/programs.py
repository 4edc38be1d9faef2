"""Programs that a device of the lab runs: each in a group that dies as one, its output bounded, its time too."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from threading import Event
from typing import NamedTuple

from edgekit.errors import DeviceFailed, DeviceTimeout, DeviceUnreachable, WorkloadFailed, clip
from edgekit.lab.devices import MAX_ANSWER_BYTES

_TOLD_BYTES = 2000
# In the words of systems, and of `OutOfSpace`.
_FULL = ("No space left on device", "Disk quota exceeded", "make room or choose another disk")


class Ended(NamedTuple):
    """How a program ended, what it printed, and its last word on stderr."""

    code: int
    answer: bytes
    told: str


class Programs:
    """Those of one device. `stop` may be called from any thread."""

    def __init__(self, who: str) -> None:
        self.who = who
        self._running: set[int] = set()
        self._stopped = Event()

    def run(
        self,
        command: Sequence[str],
        timeout_s: float,
        *,
        given: bytes = b"",
        environment: Mapping[str, str] | None = None,
        started: Callable[[int], None] = lambda process: None,
        held: int | None = None,
    ) -> Ended:
        """Start it, and wait until it or its time is over; nothing of its group is left behind.

        A lease's handle that is `held` is the program's too: where we are killed, it lasts as long as the program.
        """
        if self._stopped.is_set():
            raise DeviceUnreachable(f"{self.who}: was stopped")
        with TemporaryFile() as out, TemporaryFile() as err, TemporaryFile() as source:
            source.write(given)
            source.seek(0)
            try:
                process = subprocess.Popen(
                    command, stdin=source, stdout=out, stderr=err, env=environment, start_new_session=True,
                    pass_fds=() if held is None else (held,),
                )  # fmt: skip
            except OSError as error:
                raise DeviceUnreachable(f"{self.who}: {command[0]} cannot be started: {error.strerror}") from error
            self._running.add(process.pid)
            if self._stopped.is_set():
                _kill_group(process.pid)
            try:
                started(process.pid)
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired as error:
                raise DeviceTimeout(f"{self.who}: took longer than {timeout_s:.0f} s and was ended") from error
            finally:
                self._running.discard(process.pid)
                _kill_group(process.pid)
                process.wait()
            size = out.seek(0, os.SEEK_END)
            if size > MAX_ANSWER_BYTES:
                raise WorkloadFailed(f"{self.who}: answered {size:,} bytes; at most {MAX_ANSWER_BYTES:,} are read")
            out.seek(0)
            err.seek(max(0, err.seek(0, os.SEEK_END) - _TOLD_BYTES))
            lines = err.read().decode("utf-8", "replace").strip().splitlines()
            return Ended(code, out.read(), clip(lines[-1] if lines else "no word", 300))

    def stop(self) -> None:
        """End what runs, and whatever would be started after it."""
        self._stopped.set()
        for process in list(self._running):
            _kill_group(process)


def refusal(who: str, ended: Ended) -> DeviceFailed:
    """What an exit code means: a full disk is the machine's trouble and may be over later, all else is an answer."""
    if any(word in ended.told for word in _FULL):
        return DeviceFailed(f"{who}: its disk is full: {ended.told}; make room there, and go on with --resume")
    return WorkloadFailed(f"{who}: exit code {ended.code}: {ended.told}")


def _kill_group(process: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
