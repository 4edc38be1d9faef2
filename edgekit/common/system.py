"""What POSIX and Windows do differently with files, in one place. Where Windows has nothing alike, it is left out."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_LOCKED_BYTE = 1 << 30  # behind a lock file's text: Windows lets nobody read a locked byte
_seeking = Lock()  # Windows moves the file's own position


def try_lock(handle: int) -> bool:
    """Lock an open file for this process alone; return False if another one has it. Closing the file unlocks it."""
    try:
        if sys.platform == "win32":
            os.lseek(handle, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            os.lseek(handle, 0, os.SEEK_SET)
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the second on Windows
        return False
    return True


def open_folder(path: Path) -> int | None:
    """Open a folder, to sync or lock it; None on Windows, which can do neither."""
    return None if sys.platform == "win32" else os.open(path, os.O_RDONLY)


def share_folder(handle: int) -> None:
    """Share the lock of an open folder, so that no process has it alone."""
    if sys.platform != "win32":
        fcntl.flock(handle, fcntl.LOCK_SH)


@contextmanager
def folder_alone(path: Path, *, may_wait: bool) -> Iterator[None]:
    """Hold a folder alone, where its file system has locks. Raises `BlockingIOError` instead of waiting."""
    handle = None
    try:
        try:
            handle = open_folder(path)
            if handle is not None and sys.platform != "win32":
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if may_wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            pass  # a network file system without locks of folders, or a folder that may be written but not read
        yield
    finally:
        if handle is not None:
            os.close(handle)


def read_at(handle: int, count: int, offset: int) -> bytes:
    """Read at most `count` bytes at `offset`, from any thread."""
    if sys.platform == "win32":
        with _seeking:
            os.lseek(handle, offset, os.SEEK_SET)
            return os.read(handle, count)
    return os.pread(handle, count, offset)


def write_at(handle: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, from any thread."""
    view = memoryview(data)
    while view:
        if sys.platform == "win32":
            with _seeking:
                os.lseek(handle, offset, os.SEEK_SET)
                count = os.write(handle, view)
        else:
            count = os.pwrite(handle, view, offset)
        view, offset = view[count:], offset + count


def release_pages(memory: mmap.mmap, start: int, stop: int) -> None:
    """Return mapped pages to the system, those that `start` is within included; the next access reads them again."""
    start = start // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform != "win32" and stop > start:
        memory.madvise(mmap.MADV_DONTNEED, start, stop - start)
