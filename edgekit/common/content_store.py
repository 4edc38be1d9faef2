"""A content-addressed store: each folder has the hash of its inputs as its key, is made once and reused.

A folder is complete or absent. If several processes need the same one, one makes it and the others wait. The partial
folder of a killed process is kept, and the next process resumes from it. Only `drop` and `keep_within` remove folders,
and none that a process holds (`Hold`); a store with a limit calls `keep_within` when it has made a folder.
"""

from __future__ import annotations

import os
import re
import shutil
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from edgekit.common.file_lock import file_lock, is_named
from edgekit.common.files import home, sync_folder
from edgekit.common.system import folder_alone, open_folder, share_folder
from edgekit.common.units import parse_bytes
from edgekit.errors import EdgekitError, InvalidInput

_KEY = re.compile(r"[0-9a-f]{64}")
_KEPT = re.compile(r"(?P<key>[0-9a-f]{64})|\.(?P<half>[0-9a-f]{64})\.(?:part|gone)")
IN_USE = "a process uses it"
DEFAULT_LIMIT_BYTES = 16 << 30


class Hold:
    """Keeps a file or folder of a store from being dropped, until `close` or until this object is gone."""

    def __init__(self, handle: int | None) -> None:
        self._close = None if handle is None else weakref.finalize(self, os.close, handle)

    @classmethod
    def of(cls, path: Path) -> Hold | None:
        """Hold `path`; return None if it is missing. Where the system has no file locks, nothing is held."""
        try:
            handle = open_folder(path)
        except FileNotFoundError:
            return None
        if handle is None:
            return cls(None) if path.exists() else None
        hold = cls(handle)
        with suppress(OSError):  # a network file system without locks of folders
            share_folder(handle)
        return hold if is_named(handle, path) else None

    def close(self) -> None:
        if self._close is not None:
            self._close()


class ContentStore:
    """The folders under `root`, by key (64 hexadecimal digits).

    With `limit_bytes`, a new folder drops the least recently used ones beyond it; the new one stays whatever it takes.
    """

    def __init__(self, root: Path, limit_bytes: int | None = None) -> None:
        self.root = root
        self._limit_bytes = limit_bytes

    def get(
        self,
        key: str,
        make: Callable[[Path], None],
        check: Callable[[Path], object],
        waiting: Callable[[str], None] = lambda holder: None,
    ) -> Path:
        """Return the folder of `key`; make it if it is missing or `check` raises an `EdgekitError`.

        `make` fills a temporary folder, which may hold files of an interrupted run and is renamed afterwards.
        `waiting` is called once with a description of another process that is making the folder already.
        """
        place = self._place(key)
        if self._is_fine(place, check):
            return _used(place)
        with self._lock(key, waiting):
            if self._is_fine(place, check):
                return _used(place)
            if place.exists():
                shutil.rmtree(place)
            shutil.rmtree(self.root / f".{key}.gone", ignore_errors=True)  # of a process that was killed in `drop`
            partial = self.root / f".{key}.part"
            partial.mkdir(exist_ok=True)
            try:
                make(partial)
            except BaseException:
                with suppress(OSError):
                    partial.rmdir()  # succeeds only if it is empty: `make` failed before any work
                raise
            sync_folder(partial)
            size = _bytes_in(partial)  # without the lock, another process may drop it already
            partial.rename(place)
            sync_folder(self.root)
        if self._limit_bytes is not None:
            self.keep_within(max(0, self._limit_bytes - size), spare=key)
        return place

    def hold(
        self,
        key: str,
        make: Callable[[Path], None],
        check: Callable[[Path], object],
        waiting: Callable[[str], None] = lambda holder: None,
    ) -> tuple[Path, Hold]:
        """Return the folder as `get` does, and its hold."""
        while True:
            place = self.get(key, make, check, waiting)
            hold = Hold.of(place)
            if hold is not None:
                return place, hold

    def folders(self) -> list[Path]:
        """Return every complete folder."""
        return sorted(path for path in self.root.glob("*") if _KEY.fullmatch(path.name) and path.is_dir())

    def keep_within(self, limit_bytes: int, spare: str) -> None:
        """Drop the least recently used folders until all but `spare` take at most `limit_bytes`.

        Partial folders of killed processes count and are dropped too. A folder that another process is making stays,
        and files that another process has open remain readable.
        """
        others = self._others(spare)
        total = sum(size for _, size, _ in others)
        for _, size, path in sorted(others):
            if total <= limit_bytes:
                return
            if not self.drop(path):
                total -= size

    def _others(self, spare: str) -> list[tuple[float, int, Path]]:
        """Return (time of last use, bytes, path) of every folder but `spare`; half-dropped ones have time 0."""
        others = []
        for path in self.root.iterdir() if self.root.is_dir() else ():
            match = _KEPT.fullmatch(path.name)
            is_gone = path.suffix == ".gone"
            if match is not None and (is_gone or spare not in (match["key"], match["half"])):
                try:
                    used = 0.0 if is_gone else path.stat().st_mtime
                    others.append((used, _bytes_in(path), path))
                except FileNotFoundError:
                    continue  # another process dropped or renamed it
        return others

    def drop(self, path: Path) -> str:
        """Remove a file or folder of this store; return why it stays, or an empty text.

        It is renamed first, so that no process sees it half removed.
        """
        key = path.name.strip(".").split(".")[0]
        gone = self.root / f".{key}.gone"
        try:
            with self._lock(key, None) as is_ours:
                if not is_ours:
                    return IN_USE
                _remove(gone)
                if path.exists() and path != gone:
                    with folder_alone(path, may_wait=False):
                        path.rename(gone)
                    _remove(gone)
        except BlockingIOError:
            return IN_USE
        except InvalidInput as error:
            return str(error)
        except OSError as error:
            return error.strerror or str(error)
        return f"{gone} cannot be removed" if gone.exists() else ""

    def remove_stale_locks(self) -> None:
        """Remove the lock files of killed processes."""
        for path in self.root.glob(".*.lock"):
            with suppress(InvalidInput, OSError), file_lock(path, None, ""):
                pass  # the end of the block removes it

    def _place(self, key: str) -> Path:
        assert _KEY.fullmatch(key), key
        return self.root / key

    @staticmethod
    def _is_fine(path: Path, check: Callable[[Path], object]) -> bool:
        if not path.is_dir():
            return False
        try:
            check(path)
        except EdgekitError:
            return False
        return True

    def _lock(self, key: str, waiting: Callable[[str], None] | None) -> AbstractContextManager[bool]:
        is_ours = home() in self.root.parents
        fix = "set EDGEKIT_HOME to a folder that can be written" if is_ours else "choose another with --store"
        return file_lock(self.root / f".{key}.lock", waiting, fix)


def bounded_store(name: str) -> ContentStore:
    """Return a store of the user's cache within `EDGEKIT_STORE`, such as `8GiB`, or 16 GiB."""
    setting = os.environ.get("EDGEKIT_STORE", "").strip()
    limit = parse_bytes(setting, "EDGEKIT_STORE") if setting else DEFAULT_LIMIT_BYTES
    return ContentStore(home() / name, limit)


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _used(path: Path) -> Path:
    """Record now as the time of last use, and return `path`."""
    with suppress(OSError):  # a store that this user may only read
        os.utime(path)
    return path
