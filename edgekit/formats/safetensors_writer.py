"""A writer of one safetensors file that accepts blocks of rows in any order."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgekit.common.files import disk_full, free_bytes, sync_folder
from edgekit.common.system import write_at
from edgekit.errors import OutOfSpace
from edgekit.formats.safetensors import ITEM_BYTES, TensorEntry

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ALIGNMENT = 64


class TensorWriter(AbstractContextManager["TensorWriter"]):
    """Writes rows of the given tensors in any order; `seal` syncs the file and renames it to its final name.

    Disk space is reserved before the first write. Leaving the `with` block without `seal` removes the file.
    Raises `OutOfSpace`.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self.path = path
        header, self.entries, self.bytes = _layout(tensors)
        self._written = dict.fromkeys(self.entries, 0)
        self._counting = threading.Lock()
        self._sealed = False
        free = free_bytes(path.parent)
        if free < self.bytes:
            raise OutOfSpace(str(path), self.bytes, free)
        with disk_full(path, self.bytes):
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
            self._handle, self._temporary = handle, Path(name)
            try:
                self._temporary.chmod(0o644)
                _reserve(handle, self.bytes)
                write_at(handle, header, 0)
            except BaseException:
                self.discard()
                raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._sealed:
            self.discard()

    def write(self, name: str, rows: NDArray[Any], first_row: int = 0) -> None:
        """Write rows of a tensor from `first_row` on. Write each row once, from any thread."""
        entry = self.entries[name]
        data = np.ascontiguousarray(rows)
        start = entry.start + first_row * entry.row_bytes
        assert start + data.nbytes <= entry.stop, (name, first_row, rows.shape)
        with disk_full(self.path, self.bytes):
            write_at(self._handle, data.reshape(-1).view(np.uint8).data, start)
        with self._counting:
            self._written[name] += data.nbytes

    def seal(self) -> None:
        """Sync the file and give it its final name."""
        missing = [name for name, entry in self.entries.items() if self._written[name] != entry.bytes]
        assert not missing, f"not written whole: {missing[:3]}"
        with disk_full(self.path, self.bytes):
            os.fsync(self._handle)
        os.close(self._handle)
        self._temporary.replace(self.path)
        self._sealed = True
        sync_folder(self.path.parent)

    def discard(self) -> None:
        """Remove the unfinished file."""
        os.close(self._handle)
        self._sealed = True
        self._temporary.unlink(missing_ok=True)


def _layout(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, TensorEntry], int]:
    """Return the header, the tensors' positions and the file's size. The widest types come first, for alignment."""
    ordered = sorted(tensors, key=lambda name: -ITEM_BYTES[tensors[name][0]])
    relative: dict[str, TensorEntry] = {}
    position = 0
    for name in ordered:
        dtype, shape = tensors[name]
        count = int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[dtype]
        relative[name] = TensorEntry(dtype, shape, position, position + count)
        position += count
    described = {
        name: {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.start, entry.stop]}
        for name, entry in relative.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **described}, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    base = len(header)
    entries = {
        name: entry._replace(start=base + entry.start, stop=base + entry.stop) for name, entry in relative.items()
    }
    return header, entries, base + position


def _reserve(handle: int, count: int) -> None:
    if sys.platform != "linux":
        os.ftruncate(handle, count)  # macOS has no fallocate; the free space was checked above
        return
    try:
        os.posix_fallocate(handle, 0, count)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(handle, count)
