"""Where edgekit keeps things, and how a file is written so that it is either whole or absent."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgekit.errors import OutOfSpace

_BLOCK = 1 << 20


def home() -> Path:
    """Where caches and facts stand: `EDGEKIT_HOME`, or `edgekit` in the user's cache directory."""
    chosen = os.environ.get("EDGEKIT_HOME")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgekit"


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes) -> None:
    """Write `path` atomically: a temporary file beside it, fsync, rename, fsync of the folder."""
    with disk_full(path, len(data)):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                os.fchmod(handle, 0o644)  # as other files are: another user may serve what this one made
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


@contextmanager
def disk_full(path: Path, needed_bytes: int) -> Iterator[None]:
    """Turns the OS's "no space" into an error that says how much is needed."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OutOfSpace(str(path), needed_bytes, free_bytes(path)) from error


def free_bytes(path: Path) -> int:
    """Free bytes on the disk that holds `path`, or that will hold it."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def file_sha256(path: Path) -> str:
    """The hash of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        block = bytearray(_BLOCK)
        view = memoryview(block)
        while count := file.readinto(block):
            digest.update(view[:count])
    return digest.hexdigest()


def boot_id() -> str:
    """Changes whenever the machine is started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
