"""Who uses a device: one at a time, among all processes of this user on this machine. It knows no devices.

A lease dies with its process, whatever kills it; a child that inherits its handle goes on holding it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from time import monotonic, sleep

from edgekit.errors import DeviceTimeout
from edgekit.files import home

_STEP_S = 0.05
_held: dict[str, Lock] = {}
_held_lock = Lock()


@contextmanager
def lease(device: str, who: str, timeout_s: float) -> Iterator[int]:
    """Hold what `device` names, for the length of the block; yields the handle for a child that must hold it too."""
    with _held_lock:
        here = _held.setdefault(device, Lock())
    ends = monotonic() + timeout_s
    if not here.acquire(timeout=timeout_s):
        raise _busy(who, timeout_s)
    try:
        folder = home() / "leases"
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / hashlib.sha256(device.encode()).hexdigest()[:32], os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while not _is_ours(handle):
                if monotonic() >= ends:
                    raise _busy(who, timeout_s)
                sleep(_STEP_S)
            yield handle
        finally:
            os.close(handle)
    finally:
        here.release()


def _is_ours(handle: int) -> bool:
    if sys.platform == "win32":
        return True  # processes are not kept apart there, threads are
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _busy(who: str, timeout_s: float) -> DeviceTimeout:
    return DeviceTimeout(
        f"{who}: was busy for {timeout_s:g} s; another run measures on it, or a killed one left a program"
    )
