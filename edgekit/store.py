"""What was made once is found again: folders addressed by the hash of what they were made of.

A folder is whole or absent. Of several processes that want the same one, one makes it and the others wait. What a
killed process left is kept, so that the next one goes on from there. Knows nothing of what the folders hold.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from edgekit.errors import EdgekitError, InvalidInput, Unsupported
from edgekit.files import boot_id, home, sync_folder

_KEY = re.compile(r"[0-9a-f]{64}")
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
            return place
        with self._lock(key, waiting):
            if self._is_fine(place, check):
                return place
            if place.exists():
                shutil.rmtree(place)
            partial = self.root / f".{key}.part"
            partial.mkdir(exist_ok=True)
            make(partial)
            sync_folder(partial)
            partial.rename(place)
            sync_folder(self.root)
        return place

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
    def _lock(self, key: str, waiting: Callable[[str], None]) -> Iterator[None]:
        """One process at a time. The kernel frees the lock of a process that died, so none is ever stale."""
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
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(handle)


def _hold(path: Path, lock: Callable[[int, int], None], how: int, waiting: Callable[[str], None]) -> int:
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
            if not told:
                waiting(os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process")
                told = True
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        time.sleep(_POLL_S if told else 0)
