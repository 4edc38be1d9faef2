"""Exclusive leases of devices among all processes of this user on this machine.

The OS drops a lease when its process ends; a child that inherits the file descriptor keeps it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep

from edgekit.common.files import home
from edgekit.common.system import try_lock
from edgekit.errors import DeviceTimeout

_STEP_S = 0.05


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
            sleep(_STEP_S)
        yield fd
    finally:
        os.close(fd)
