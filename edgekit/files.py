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

from edgekit.errors import InvalidInput, OutOfSpace, clip

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


def check_output(path: Path | None) -> None:
    """Refuse a path that a user named for a result and that cannot be written, before hours go into that result."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise InvalidInput(f"{clip(str(path))}: is a folder; name a file in it")
        place = path.absolute().parent
        while not place.exists() and place != place.parent:
            place = place.parent
        if not place.is_dir() or not os.access(path if path.exists() else place, os.W_OK):
            raise InvalidInput(f"{path}: cannot be written: {place} allows no new files; choose another path")
    except OSError as error:
        raise _unwritable(path, error) from error


def write_output(path: Path, data: bytes) -> None:
    """Write a result where a user named it: a file is whole or as it was; a pipe or device is never replaced."""
    check_output(path)
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                file.write(data)
        else:
            write_file(Path(os.path.realpath(path)), data)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> InvalidInput:
    return InvalidInput(f"{clip(str(path))}: cannot be written: {error.strerror}; choose another path")


def copy_file(source: Path, target: Path) -> None:
    """A copy whose bytes survive a power cut; its name does once the folder is synced too."""
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


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
