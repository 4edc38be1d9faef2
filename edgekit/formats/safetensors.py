"""A reader of untrusted safetensors files: every number of a header is checked before it is used.

Files are mapped read-only, so reading takes no private memory and pages can be released. Pickled weights are refused
by their type and never opened.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edgekit.common.files import not_read, open_regular
from edgekit.common.parsing import parse_json, read_bytes
from edgekit.common.system import release_pages
from edgekit.errors import InvalidInput, Unsupported, quote_short
from edgekit.formats.int_packing import IntegerFormat, bf16_to_float32

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = slice | NDArray[np.int64]

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8
MAX_NAME = 512
INDEX = "model.safetensors.index.json"

# bfloat16 and float8 are read as their bits.
_NUMPY = {"BOOL": "?", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1", "I16": "<i2"}
_NUMPY |= {"U16": "<u2", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "U32": "<u4", "F32": "<f4", "I64": "<i8"}
_NUMPY |= {"U64": "<u8", "F64": "<f8"}
ITEM_BYTES = {name: np.dtype(code).itemsize for name, code in _NUMPY.items()}
_FLOATS = ("F32", "F16", "BF16", "F64")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")


class TensorEntry(NamedTuple):
    """Type, shape and position of a tensor: `start` and `stop` are offsets in its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start

    @property
    def row_bytes(self) -> int:
        """Bytes of one index along the first dimension."""
        return math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]


class TensorBytes(NamedTuple):
    """The bytes of one tensor on the disk."""

    path: Path
    offset: int
    length: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read the tensors of a file, in the order of their bytes. Raises `InvalidInput` unless they fill it exactly."""
    refuse_pickle(path)
    try:
        with open_regular(path) as file:
            info = os.fstat(file.fileno())
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, info.st_size - 8):
                raise InvalidInput(
                    f"{path}: offset 0: the header should have {length:,} bytes and the file has {info.st_size:,}; "
                    f"at most {MAX_HEADER_BYTES:,} are allowed: is the file complete, and a safetensors file?"
                )
            header = file.read(length)
    except OSError as error:
        raise not_read(path, error) from error
    described = parse_json(header, f"{path}: header")
    described.pop("__metadata__", None)
    base = 8 + length
    entries = {name: _entry(path, name, value, base, info.st_size) for name, value in described.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    position, before = base, "the header"
    for name, entry in ordered.items():
        if entry.start != position:
            kind = "overlaps" if entry.start < position else "leaves a gap after"
            raise InvalidInput(
                f"{path}: tensor {quote_short(name)} at offset {entry.start} {kind} {quote_short(before)}, which "
                f"ends at {position}"
            )
        position, before = entry.stop, name
    if position != info.st_size:
        raise InvalidInput(
            f"{path}: tensor {quote_short(before)} ends at offset {position} and the file at {info.st_size}; is it "
            f"complete?"
        )
    return ordered


def _entry(path: Path, name: str, value: Any, base: int, file_bytes: int) -> TensorEntry:
    where = f"{path}: tensor {quote_short(name)}"
    if not 0 < len(name) <= MAX_NAME:
        raise InvalidInput(f"{where}: a name has 1 to {MAX_NAME} characters")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise InvalidInput(f"{where}: needs exactly dtype, shape and data_offsets, found {quote_short(value)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise InvalidInput(f"{where}: unknown dtype {quote_short(dtype)}; known: {', '.join(ITEM_BYTES)}")
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise InvalidInput(f"{where}: {quote_short(shape)} is not a shape of at most {MAX_DIMENSIONS} dimensions")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InvalidInput(f"{where}: {quote_short(offsets)} are not two offsets in order")
    start, stop = base + offsets[0], base + offsets[1]
    if stop > file_bytes:
        raise InvalidInput(f"{where}: ends at offset {stop}, beyond the file's {file_bytes} bytes; is it complete?")
    needed = math.prod(shape) * ITEM_BYTES[dtype]
    if needed != stop - start:
        raise InvalidInput(
            f"{where}: {dtype} of shape {quote_short(shape)} needs {quote_short(needed)} bytes, "
            f"{stop - start} stand at offset {start}"
        )
    return TensorEntry(dtype, tuple(shape), start, stop)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)


def refuse_pickle(path: Path) -> None:
    """Refuse weights in a pickle format, by their suffix."""
    if path.suffix.lower() in _PICKLES:
        raise Unsupported(f"{path}: pickled weights can run code when they are opened; give safetensors instead")


class TensorFolder(AbstractContextManager["TensorFolder"]):
    """The tensors of one safetensors file, or of shards with an index. Files are mapped, not copied."""

    integer_formats: Mapping[str, IntegerFormat] = {}  # of tensors that are read as integers with scales: none are

    def __init__(self, files: dict[str, Path], entries: dict[str, TensorEntry], shard_of: dict[str, str]) -> None:
        self.files = files
        self.entries = entries
        self._shard_of = shard_of
        self._maps: dict[str, mmap.mmap] = {}

    @staticmethod
    def open(folder: Path) -> TensorFolder:
        """Open a folder with `model.safetensors` or an index, or one safetensors file."""
        refuse_pickle(folder)
        if folder.is_file():
            return _of_files({folder.name: folder})
        single, index = folder / "model.safetensors", folder / INDEX
        if single.exists():
            return _of_files({single.name: single})
        if index.exists():
            return _of_index(folder, index)
        others = sorted(folder.glob("*.safetensors"))
        if len(others) == 1:
            return _of_files({others[0].name: others[0]})
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            refuse_pickle(path)
        raise InvalidInput(f"{folder}: holds no model.safetensors and no {INDEX}; is this a model's folder?")

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap all files that no array refers to."""
        for mapped in self._maps.values():
            try:
                mapped.close()
            except BufferError:
                continue  # an array still refers to it; it is unmapped with that array
        self._maps.clear()

    def entry(self, name: str) -> TensorEntry:
        """Return type, shape and position of a tensor. Raises `InvalidInput` for a missing one."""
        try:
            return self.entries[name]
        except KeyError:
            where = next(iter(self.files.values())).parent
            raise InvalidInput(f"{where}: tensor {quote_short(name)} is missing; is the model complete?") from None

    def renamed(self, rename: Callable[[str], str]) -> TensorFolder:
        """Return the same tensors under other names. Raises `InvalidInput` if two get the same name."""
        entries = {rename(name): entry for name, entry in self.entries.items()}
        if len(entries) < len(self.entries):
            raise InvalidInput(f"{next(iter(self.files.values())).parent}: a tensor is stored under two names")
        return TensorFolder(self.files, entries, {rename(name): shard for name, shard in self._shard_of.items()})

    def with_files(self, files: Mapping[str, Path]) -> TensorFolder:
        """Return these tensors and those in other files, whose names get the file's key and a dot as prefix."""
        merged = TensorFolder({**self.files, **files}, dict(self.entries), dict(self._shard_of))
        for key, path in files.items():
            entries = {f"{key}.{name}": entry for name, entry in read_header(path).items()}
            merged.entries |= entries
            merged._shard_of |= dict.fromkeys(entries, key)
        return merged

    def place(self, name: str) -> TensorBytes:
        """Return the file, offset and length of a tensor's bytes."""
        entry = self.entry(name)
        return TensorBytes(self.files[self._shard_of[name]], entry.start, entry.bytes)

    def array(self, name: str, rows: Rows | None = None) -> NDArray[Any]:
        """Return a read-only view of a tensor, or of some of its rows, as stored; bfloat16 as uint16 bits."""
        entry = self.entry(name)
        whole = np.frombuffer(
            self._map(self._shard_of[name]),
            dtype=_NUMPY[entry.dtype],
            count=math.prod(entry.shape),
            offset=entry.start,
        ).reshape(entry.shape)
        return whole if rows is None else whole[rows]

    def floats(self, name: str, rows: Rows | None = None) -> NDArray[np.float32]:
        """Return a float tensor, or some of its rows, copied to float32."""
        dtype = self.entry(name).dtype
        if dtype not in _FLOATS:
            raise InvalidInput(
                f"tensor {quote_short(name)} is stored as {dtype}; a float type is needed: {', '.join(_FLOATS)}"
            )
        stored = self.array(name, rows)
        return bf16_to_float32(stored) if dtype == "BF16" else stored.astype(np.float32)

    def release(self, name: str) -> None:
        """Return the mapped pages of a tensor to the system; the next access reads them again."""
        entry, mapped = self.entry(name), self._maps.get(self._shard_of[name])
        if mapped is not None:
            release_pages(mapped, entry.start, entry.stop)

    def _map(self, shard: str) -> mmap.mmap:
        if shard not in self._maps:
            with open_regular(self.files[shard]) as file:
                self._maps[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[shard]


def _of_files(files: dict[str, Path]) -> TensorFolder:
    entries: dict[str, TensorEntry] = {}
    shard_of: dict[str, str] = {}
    for shard, path in files.items():
        for name, entry in read_header(path).items():
            if name in entries:
                raise InvalidInput(f"{path}: tensor {quote_short(name)} is in {shard_of[name]} too")
            entries[name], shard_of[name] = entry, shard
    return TensorFolder(files, entries, shard_of)


def _of_index(folder: Path, index: Path) -> TensorFolder:
    weight_map = parse_json(read_bytes(index, MAX_HEADER_BYTES), str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidInput(f"{index}: weight_map is missing or empty")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise InvalidInput(
                f"{index}: tensor {quote_short(name)} is in {quote_short(shard)}, which is not a file name"
            )
        refuse_pickle(Path(shard))
        if not _SHARD.fullmatch(shard):
            raise InvalidInput(
                f"{index}: tensor {quote_short(name)} is in {quote_short(shard)}, which is not a file name"
            )
    tensors = _of_files({shard: folder / shard for shard in sorted(set(weight_map.values()))})
    for name, shard in weight_map.items():
        if tensors._shard_of.get(name) != shard:
            raise InvalidInput(
                f"{folder / shard}: tensor {quote_short(name)} is missing, though {INDEX} says it is there"
            )
    return tensors
