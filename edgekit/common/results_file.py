"""A jsonl file of results, one object with an `id` per line. Interrupted work continues after the last whole line."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from edgekit.common.files import disk_full
from edgekit.common.parsing import parse_json
from edgekit.common.system import try_lock
from edgekit.errors import InvalidInput


class ResultsFile:
    """Appends results to `path`, or to stdout if it is None. Opening drops an incomplete last line.

    `names` holds the ids written so far.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.names: set[str | int] = set()
        self._file: BinaryIO = sys.stdout.buffer
        self._is_new = False

    def __enter__(self) -> ResultsFile:
        if self._path is None:
            return self
        self._is_new = not self._path.exists()
        try:
            file = self._path.open("a+b")
        except OSError as error:
            raise InvalidInput(f"{self._path}: cannot be written: {error.strerror}; choose another path") from error
        try:
            self._lock(file)
            self._read(file)
        except BaseException:
            file.close()
            raise
        self._file = file
        return self

    def _lock(self, file: BinaryIO) -> None:
        """Let no other process write or remove the file; two at once would cut each other's lines."""
        with suppress(OSError):  # a file system without such locks
            if not try_lock(file.fileno()):
                raise InvalidInput(f"{self._path}: another process writes it now; wait for it or choose another path")

    def _read(self, file: BinaryIO) -> None:
        file.seek(0)
        whole = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            name = parse_json(line, f"{self._path}, byte {whole}").get("id")
            if not isinstance(name, str | int):
                raise InvalidInput(f"{self._path}: holds a line without an id; choose another file")
            self.names.add(name)
        file.truncate(whole)
        file.seek(0, os.SEEK_END)

    def write(self, result: dict[str, Any]) -> None:
        line = json.dumps(result, ensure_ascii=False).encode() + b"\n"
        if self._path is None:
            self._file.write(line)
            self._file.flush()
        else:
            self._append(self._path, line)
        self.names.add(result["id"])

    def _append(self, path: Path, line: bytes) -> None:
        """Write a whole line or nothing. Raises `OutOfSpace` with the file and the bytes."""
        handle, left = self._file.fileno(), memoryview(line)
        size = os.fstat(handle).st_size
        try:
            with disk_full(path, len(line)):
                while left:
                    left = left[os.write(handle, left) :]
        except BaseException:
            with suppress(OSError):
                os.ftruncate(handle, size)
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._path is None:
            return
        with self._file as file:
            if error is None:
                os.fsync(file.fileno())
            elif self._is_new and os.fstat(file.fileno()).st_size == 0:
                self._path.unlink(missing_ok=True)
