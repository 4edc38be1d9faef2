"""Locks between processes, on files. The kernel releases the lock of a dead process, so none is ever stale."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from edgekit.common.files import boot_id
from edgekit.errors import InvalidInput, Unsupported

_POLL_S = 0.2


@contextmanager
def file_lock(path: Path, waiting: Callable[[str], None] | None, fix: str) -> Iterator[bool]:
    """Hold the lock file `path` during the block; its folder is created if missing, and the file is removed at the end.

    `waiting` is called once with a description of the process that holds it. Without `waiting`, do not wait: yield
    False if another process holds it. Raises `InvalidInput` with `fix` if the folder cannot be written.
    """
    file_locks()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _acquire(path, waiting)
    except OSError as error:
        raise InvalidInput(f"{path.parent}: cannot be written: {error.strerror or error}; {fix}") from error
    if handle is None:
        yield False
        return
    try:
        yield True
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(handle)


def file_locks() -> ModuleType:
    """Return the module `fcntl`. Raises `Unsupported` where the system lacks it."""
    try:
        import fcntl
    except ImportError:
        raise Unsupported("this needs file locks, which this system lacks; use Linux, macOS, Android or iOS") from None
    return fcntl


def _acquire(path: Path, waiting: Callable[[str], None] | None) -> int | None:
    fcntl = file_locks()
    reported = False
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        holder = ""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_named(handle, path):  # otherwise the previous holder has removed the file
                with suppress(OSError):  # a full disk must not keep anyone from removing files
                    os.ftruncate(handle, 0)
                    os.write(handle, f"process {os.getpid()}, boot {boot_id()}\n".encode())
                return handle
        except BlockingIOError:
            holder = os.pread(handle, 200, 0).decode(errors="replace").partition(",")[0] or "another process"
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        if holder:
            if waiting is None:
                return None
            if not reported:
                waiting(holder)
            reported = True
        time.sleep(_POLL_S if reported else 0)


def is_named(handle: int, path: Path) -> bool:
    """Return whether `path` is still the name of the open file."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
