"""The queries of hardware detection, in one place so that tests can replace them."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Sequence
from typing import NamedTuple

from edgekit.common.cores import cores_allowed
from edgekit.common.machine_speed import MachineSpeed, machine_speed, physical_memory
from edgekit.common.nvidia import Gpu, find_gpus
from edgekit.common.packages import version_of
from edgekit.common.proc import read_or_none


class HostProbe(NamedTuple):
    """Queries about a machine. None: not known."""

    system: str  # Linux, Darwin, Windows
    architecture: str  # x86_64, aarch64, arm64, AMD64
    kernel: str
    read: Callable[[str], str | None]
    run: Callable[[Sequence[str]], str | None]
    cores_allowed: Callable[[], int]
    physical_memory: Callable[[], int | None]
    gpus: Callable[[], list[Gpu]]
    installed: Callable[[str], str | None]  # a distribution's version
    speed: Callable[[int, int, int], MachineSpeed]  # cores, cache bytes, memory bytes


def local_host(*, measure_again: bool = False) -> HostProbe:
    """Return the queries to this machine."""
    return HostProbe(
        system=platform.system(),
        architecture=platform.machine(),
        kernel=platform.release(),
        read=read_or_none,
        run=_run,
        cores_allowed=cores_allowed,
        physical_memory=physical_memory,
        gpus=find_gpus,
        installed=version_of,
        speed=lambda cores, cache, memory: machine_speed(cores, cache, memory, again=measure_again),
    )


def _run(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, timeout=5, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    # sysctl fails if one of several names is unknown, and still prints the others.
    return done.stdout.decode(errors="replace")
