"""What was made once is found again: folders addressed by the hash of what they were made of.

A folder is whole or absent. Of several processes that want the same one, one makes it and the others wait. What a
killed process left is kept, so that the next one goes on from there. Nothing is dropped unless somebody asks for that.
Knows nothing of what the folders hold.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgekit.errors import EdgekitError, InvalidInput, Unsupported
from edgekit.files import boot_id, home, sync_folder

_KEY = re.compile(r"[0-9a-f]{64}")
_KEPT = re.compile(r"(?P<key>[0-9a-f]{64})|\.(?P<half>[0-9a-f]{64})\.(?:part|gone)")
_POLL_S = 0.2


class Store:
    """Folders by key, under `root`."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or home()) / "weights"

    def find(self, key: str) -> Path | None:
        """The folder with that key, where it is there."""
        place = self._place(key)
        return place if place.is_dir() else None

    def get(
        self,
        key: str,
        make: Callable[[Path], None],
        check: Callable[[Path], None],
        waiting: Callable[[str], None] = lambda holder: None,
    ) -> Path:
        """The folder with that key, made by `make` where it is not there or `check` refuses it.

        `make` gets a folder that may hold what an interrupted run left; it is given its final name when `make` returns.
        `waiting` hears who is making it.
        """
        place = self._place(key)
        if self._is_fine(place, check):
            return _used(place)
        with self._lock(key, waiting):
            if self._is_fine(place, check):
                return _used(place)
            if place.exists():
                shutil.rmtree(place)
            partial = self.root / f".{key}.part"
            partial.mkdir(exist_ok=True)
            make(partial)
            sync_folder(partial)
            partial.rename(place)
            sync_folder(self.root)
        return place

    def keep_within(self, limit_bytes: int, spare: str) -> None:
        """Drop what was used the longest ago until all but `spare` takes at most so many bytes.

        What a killed process left counts too. What another process is making stays; what it has open stays readable.
        """
        found = self._others(spare)
        taken = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if taken <= limit_bytes:
                return
            if self._drop(path):
                taken -= size

    def _others(self, spare: str) -> list[tuple[float, int, Path]]:
        """When each folder was last used, its bytes, and where it stands; folders that are being dropped come first."""
        found = []
        for path in self.root.iterdir() if self.root.is_dir() else ():
            match = _KEPT.fullmatch(path.name)
            is_gone = path.suffix == ".gone"
            if match is not None and (is_gone or spare not in (match["key"], match["half"])):
                try:
                    used = 0.0 if is_gone else path.stat().st_mtime
                    found.append((used, sum(each.stat().st_size for each in path.rglob("*") if each.is_file()), path))
                except FileNotFoundError:
                    continue  # somebody else drops it, or gives it its final name
        return found

    def _drop(self, path: Path) -> bool:
        """Whether it is gone. One rename makes it so for everybody, so a folder is never seen without a part of it."""
        key = path.name.strip(".").split(".")[0]
        gone = self.root / f".{key}.gone"
        try:
            with self._lock(key, None) as is_ours:
                if not is_ours:
                    return False
                shutil.rmtree(gone, ignore_errors=True)
                if path.exists() and path != gone:
                    path.rename(gone)
                    shutil.rmtree(gone, ignore_errors=True)
        except (InvalidInput, OSError):
            return False  # a store that this user may only read
        return not gone.exists()

    def _place(self, key: str) -> Path:
        assert _KEY.fullmatch(key), key
        return self.root / key

    @staticmethod
    def _is_fine(place: Path, check: Callable[[Path], None]) -> bool:
        if not place.is_dir():
            return False
        try:
            check(place)
        except EdgekitError:
            return False
        return True

    @contextmanager
    def _lock(self, key: str, waiting: Callable[[str], None] | None) -> Iterator[bool]:
        """One process at a time. The kernel frees the lock of a process that died, so none is ever stale.

        Without `waiting` nobody waits: False says that another process holds it.
        """
        try:
            import fcntl
        except ImportError:
            raise Unsupported("quantising needs file locks, which this system lacks; use Linux or macOS") from None
        path = self.root / f".{key}.lock"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            handle = _hold(path, fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB, waiting)
        except OSError as error:
            reason = error.strerror or str(error)
            raise InvalidInput(f"{self.root}: cannot be written: {reason}; choose another with --store") from error
        if handle is None:
            yield False
            return
        try:
            yield True
        finally:
            path.unlink(missing_ok=True)
            os.close(handle)


def _used(place: Path) -> Path:
    """`place`, with the time at which it was last asked for."""
    with suppress(OSError):  # a store that this user may only read
        os.utime(place)
    return place


def _hold(path: Path, lock: Callable[[int, int], None], how: int, waiting: Callable[[str], None] | None) -> int | None:
    told = False
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            lock(handle, how)
            # The holder before us removed the file that we opened: lock the one that stands there now.
            if path.exists() and os.fstat(handle).st_ino == path.stat().st_ino:
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()}, boot {boot_id()}\n".encode())
                return handle
        except BlockingIOError:
            if waiting is None:
                os.close(handle)
                return None
            if not told:
                waiting(os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process")
                told = True
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        time.sleep(_POLL_S if told else 0)
