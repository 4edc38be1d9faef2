"""A content-addressed store: each folder has the hash of its inputs as its key, is made once and reused.

A folder is complete or absent. If several processes need the same one, one makes it and the others wait. The partial
folder of a killed process is kept, and the next process resumes from it. Only `drop` and `keep_within` remove folders,
and none that a process holds.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from edgekit.common.file_lock import file_lock, file_locks, is_named
from edgekit.common.files import sync_folder
from edgekit.errors import EdgekitError, InvalidInput

_KEY = re.compile(r"[0-9a-f]{64}")
_KEPT = re.compile(r"(?P<key>[0-9a-f]{64})|\.(?P<half>[0-9a-f]{64})\.(?:part|gone)")


class ContentStore:
    """The folders under `root`, by key (64 hexadecimal digits)."""

    def __init__(self, root: Path) -> None:
        self.root = root

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
            partial.rename(place)
            sync_folder(self.root)
        return place

    def hold(
        self,
        key: str,
        make: Callable[[Path], None],
        check: Callable[[Path], object],
        waiting: Callable[[str], None] = lambda holder: None,
    ) -> tuple[Path, int]:
        """Return the folder as `get` does, and an open file; until that is closed, no process drops the folder."""
        while True:
            place = self.get(key, make, check, waiting)
            handle = _shared(place)
            if handle is not None:
                return place, handle

    @contextmanager
    def holding(self, path: Path) -> Iterator[bool]:
        """Let no process drop a folder during the block; yield False if it is gone already."""
        handle = _shared(path)
        try:
            yield handle is not None
        finally:
            if handle is not None:
                os.close(handle)

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
            if self.drop(path):
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
                    others.append((used, sum(each.stat().st_size for each in path.rglob("*") if each.is_file()), path))
                except FileNotFoundError:
                    continue  # another process dropped or renamed it
        return others

    def drop(self, path: Path) -> bool:
        """Remove a folder of this store; return False if it is being made, is held, or cannot be removed.

        It is renamed first, so that no process sees it half removed.
        """
        key = path.name.strip(".").split(".")[0]
        gone = self.root / f".{key}.gone"
        try:
            with self._lock(key, None) as is_ours:
                if not is_ours:
                    return False
                shutil.rmtree(gone, ignore_errors=True)
                if path.exists() and path != gone:
                    with _alone(path):
                        path.rename(gone)
                    shutil.rmtree(gone, ignore_errors=True)
        except (InvalidInput, OSError):
            return False  # the store is read-only for this user
        return not gone.exists()

    def _place(self, key: str) -> Path:
        assert _KEY.fullmatch(key), key
        return self.root / key

    @staticmethod
    def _is_fine(place: Path, check: Callable[[Path], object]) -> bool:
        if not place.is_dir():
            return False
        try:
            check(place)
        except EdgekitError:
            return False
        return True

    def _lock(self, key: str, waiting: Callable[[str], None] | None) -> AbstractContextManager[bool]:
        return file_lock(self.root / f".{key}.lock", waiting, "choose another with --store")


def _shared(place: Path) -> int | None:
    """Open a folder and lock it against `_alone`; None if it was dropped meanwhile."""
    fcntl = file_locks()
    try:
        handle = os.open(place, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # a network file system without locks of folders
        fcntl.flock(handle, fcntl.LOCK_SH)
    if is_named(handle, place):
        return handle
    os.close(handle)
    return None


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Raise `BlockingIOError` if a process holds the folder; let none hold it during the block."""
    fcntl = file_locks()
    handle = os.open(place, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass  # a network file system without locks of folders: nothing could hold it
        yield
    finally:
        os.close(handle)


def _used(place: Path) -> Path:
    """Record now as the time of last use, and return `place`."""
    with suppress(OSError):  # a store that this user may only read
        os.utime(place)
    return place
