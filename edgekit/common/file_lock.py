"""Locks between processes, on files. The kernel releases the lock of a dead process, so none is ever stale."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgekit.common.files import boot_id
from edgekit.common.system import read_at, try_lock
from edgekit.errors import InvalidInput

_POLL_S = 0.2


@contextmanager
def file_lock(path: Path, waiting: Callable[[str], None] | None, fix: str) -> Iterator[bool]:
    """Hold the lock file `path` during the block; its folder is created if missing, and the file is removed at the end.

    `waiting` is called once with a description of the process that holds it. Without `waiting`, do not wait: yield
    False if another process holds it. Raises `InvalidInput` with `fix` if the folder cannot be written.
    """
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


def _acquire(path: Path, waiting: Callable[[str], None] | None) -> int | None:
    reported = False
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        holder = ""
        try:
            if not try_lock(handle):
                holder = read_at(handle, 200, 0).decode(errors="replace").partition(",")[0] or "another process"
            elif is_named(handle, path):  # otherwise the previous holder has removed the file
                with suppress(OSError):  # a full disk must not keep anyone from removing files
                    os.ftruncate(handle, 0)
                    os.write(handle, f"process {os.getpid()}, boot {boot_id()}\n".encode())
                return handle
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
