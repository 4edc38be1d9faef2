"""The cache folder, and atomic writes of files."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedReader
from pathlib import Path

from edgekit.common.system import open_folder
from edgekit.errors import InvalidInput, OutOfSpace, quote_short

PACKAGE = Path(__file__).resolve().parents[1]
_BLOCK = 1 << 20
_FICLONE = 0x40049409  # Linux: _IOW(0x94, 9, int)
_NO_SPACE = {
    errno.ENOSPC: None,
    errno.EDQUOT: "this user's disk quota",
    errno.EFBIG: "the limit on file sizes (`ulimit -f`)",
}


def home() -> Path:
    """Return the folder of caches and facts: `EDGEKIT_HOME`, or `edgekit` in the user's cache directory."""
    chosen = os.environ.get("EDGEKIT_HOME")
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError as error:
            raise InvalidInput(f"EDGEKIT_HOME={chosen!r}: no such user; give a folder") from error
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgekit"


def user_profiles() -> Path:
    """Return the folder of the user's own device profiles."""
    if os.environ.get("EDGEKIT_HOME"):
        return home() / "profiles"
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "edgekit" / "profiles"


def fix_of(error: OSError | ValueError, path: Path) -> str:
    """Return what to do about a call of the system that failed on a path."""
    number = getattr(error, "errno", None)
    if number in (errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return "free memory, or raise the limits of this user (`ulimit -a`)"
    is_ours = number in (errno.EROFS, errno.EACCES, errno.ENOTDIR) and home() in (path, *path.parents)
    return "set EDGEKIT_HOME to a folder that can be written" if is_ours else "check the path and its permissions"


def not_read(path: Path, error: OSError | ValueError) -> InvalidInput:
    """Return the error for a file that cannot be read."""
    return InvalidInput(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}; {fix_of(error, path)}")


def is_shared(path: Path, info: os.stat_result) -> bool:
    """Return True for a file with hard links: through another one, another user could rewrite checked bytes.

    Files of this package are excepted. Installers link them from their caches, and they are trusted as its code is.
    """
    return info.st_nlink != 1 and not path.resolve().is_relative_to(PACKAGE)


def is_gguf(path: Path) -> bool:
    """Return True for a file with GGUF's suffix."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable: they survive a power cut."""
    handle = open_folder(folder)
    if handle is None:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes) -> None:
    """Write `path` atomically: a temporary file in its folder, fsync, rename, fsync of the folder."""
    with disk_full(path, len(data)):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                Path(name).chmod(0o644)  # mkstemp gives 0600, but another user may serve this file
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def check_output(path: Path | None) -> None:
    """Raise `InvalidInput` before long work if the output path cannot be written. None is accepted."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise InvalidInput(f"{quote_short(str(path))}: is a folder; name a file in it")
        place = path.absolute().parent
        while not place.exists() and place != place.parent:
            place = place.parent
        if not place.is_dir() or not os.access(path if path.exists() else place, os.W_OK):
            raise InvalidInput(f"{path}: cannot be written: {place} allows no new files; choose another path")
        str(path.absolute()).encode()  # onnxruntime, for one, takes only text, and manifests hold only text
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{str(path)!a}: is no text in UTF-8; choose another path") from error
    except OSError as error:
        raise _unwritable(path, error) from error


def write_output(path: Path, data: bytes) -> None:
    """Write a result to an output path: a file is replaced atomically; a pipe or device is written to."""
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
    return InvalidInput(f"{quote_short(str(path))}: cannot be written: {error.strerror}; choose another path")


def copy_file(source: Path, target: Path) -> None:
    """Copy a file and sync its bytes; sync the folder to make the name durable too.

    Copy-on-write file systems (Btrfs, XFS) share the bytes, so that the copy takes no space until one is changed.
    """
    if not _clone(source, target):
        shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _clone(source: Path, target: Path) -> bool:
    """Clone `source` with shared blocks; return False if the system or the file system cannot."""
    if sys.platform != "linux":
        return False
    import fcntl

    with source.open("rb") as original, target.open("wb") as clone:
        try:
            fcntl.ioctl(clone, _FICLONE, original.fileno())
        except OSError:
            return False
    return True


@contextmanager
def disk_full(path: Path, needed_bytes: int) -> Iterator[None]:
    """Convert "no space" errors of the system into `OutOfSpace` with the bytes needed."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise OutOfSpace(str(path), needed_bytes, free_bytes(path), _NO_SPACE[error.errno]) from error


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of `path`, which need not exist yet."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading. Raises `InvalidInput` for a pipe, a device or a folder: a pipe could wait for ever."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise InvalidInput(f"{path}: not a regular file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def file_sha256(path: Path) -> str:
    """Return the sha256 of a regular file's bytes, in hex."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        block = bytearray(_BLOCK)
        view = memoryview(block)
        while count := file.readinto(block):
            digest.update(view[:count])
    return digest.hexdigest()


@cache
def boot_id() -> str:
    """Return an id that changes with every boot of the machine; with every process if the system has none."""
    with suppress(OSError, AttributeError, ValueError):
        if sys.platform == "darwin":
            return _macos_boot_id()
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return secrets.token_hex(16)


def _macos_boot_id() -> str:
    import ctypes

    text = ctypes.create_string_buffer(64)
    size = ctypes.c_size_t(len(text))
    if ctypes.CDLL(None).sysctlbyname(b"kern.bootsessionuuid", text, ctypes.byref(size), None, 0):
        raise OSError("no kern.bootsessionuuid")
    return text.value.decode()
