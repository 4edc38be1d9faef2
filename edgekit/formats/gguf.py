"""A GGUF file's header, read within fixed limits, and rows of its tensors as float32.

Files are untrusted: every count, length and offset is checked against the file's size before it is used, so reading
costs time and memory in proportion to that size. Files are mapped read-only; nothing is copied as a whole.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from edgekit.common.files import not_read, open_regular
from edgekit.common.system import release_pages
from edgekit.errors import InvalidInput, Unsupported, quote_short
from edgekit.formats.gguf_types import REFUSED, TYPES, dequantise, integers
from edgekit.formats.int_packing import IntegerRows, in_slices

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64 << 20  # three times the header of the largest vocabularies
MAX_TENSORS, MAX_KEYS = 1 << 16, 1 << 12
MAX_KEY_BYTES, MAX_NAME_BYTES, MAX_TEXT_BYTES = 1 << 16, 64, 1 << 20
MAX_ITEM_BYTES = 1 << 12  # a text inside an array: one token, one merge
MAX_ARRAY, MAX_TEXTS = 1 << 24, 1 << 21  # numbers in one array; texts in all arrays together
MAX_ALIGNMENT, MAX_DIMENSIONS, MAX_DIMENSION = 1 << 12, 4, 1 << 31
DEFAULT_ALIGNMENT = 32

_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
# By type number: the format, the same in `struct` and numpy.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}


class GgufStrings(Sequence[bytes]):
    """The strings of an array, each read from the mapped file on access."""

    def __init__(self, data: mmap.mmap, starts: array[int], lengths: array[int]) -> None:
        self._data, self._starts, self._lengths = data, starts, lengths

    def __len__(self) -> int:
        return len(self._starts)

    def __repr__(self) -> str:
        return f"<{len(self):,} texts>"

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        start = self._starts[index]
        return self._data[start : start + self._lengths[index]]

    def __iter__(self) -> Iterator[bytes]:
        data = self._data
        for start, length in zip(self._starts, self._lengths, strict=True):
            yield data[start : start + length]


Value = str | bool | int | float | GgufStrings | np.ndarray[Any, np.dtype[Any]]


class GgufTensor(NamedTuple):
    """The type, shape and position of a tensor in its file. `shape` has rows first."""

    type_id: int
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def type_name(self) -> str:
        return TYPES[self.type_id].name

    @property
    def row_values(self) -> int:
        """The size of the innermost dimension, which is stored in whole blocks."""
        return self.shape[-1]

    @property
    def row_bytes(self) -> int:
        kind = TYPES[self.type_id]
        return self.row_values // kind.values * kind.bytes


class GgufFile(AbstractContextManager["GgufFile"]):
    """One file: its metadata, and its tensors by their names in the file."""

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, Value],
        tensors: Mapping[str, GgufTensor],
        header_bytes: int,
        mapped: mmap.mmap,
    ) -> None:
        self.path, self.metadata, self.tensors = path, metadata, tensors
        self.header_bytes = header_bytes
        self._mapped = mapped

    @staticmethod
    def open(path: Path) -> GgufFile:
        """Map a file and read its header. Raises `InvalidInput` unless every number in it fits the file."""
        try:
            with open_regular(path) as file:
                info = os.fstat(file.fileno())
                if info.st_size < 24:
                    raise InvalidInput(f"{path}: has {info.st_size} bytes, too few for a GGUF header; is it complete?")
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise not_read(path, error) from error
        try:
            return _Header(path, mapped).read()
        except BaseException:
            with suppress(BufferError):
                mapped.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file; if an array still refers to it, it is unmapped with that array."""
        with suppress(BufferError):
            self._mapped.close()

    def header_sha256(self) -> str:
        """Return the sha256 of everything before the tensors' data."""
        return hashlib.sha256(memoryview(self._mapped)[: self.header_bytes]).hexdigest()

    def rows(self, name: str, index: slice | NDArray[np.intp] | None = None) -> NDArray[np.float32]:
        """Return rows of a tensor as float32, [rows, values]; a tensor of one dimension is one row."""
        tensor = self.tensors[name]
        blocks = self._blocks(tensor, index)

        def dequantised(some: slice) -> NDArray[np.float32]:
            values = dequantise(tensor.type_id, blocks[some], tensor.row_values)
            self._refuse_not_finite(name, values)
            return values

        return in_slices(np.empty((len(blocks), tensor.row_values), np.float32), dequantised)

    def integers(self, name: str, index: slice | NDArray[np.intp] | None = None) -> IntegerRows:
        """Return rows of a matrix as integers, scales and minima; its type must have an `integer_format`."""
        tensor = self.tensors[name]
        found = integers(tensor.type_id, self._blocks(tensor, index), tensor.row_values)
        self._refuse_not_finite(name, found.scales)
        if found.minima is not None:
            self._refuse_not_finite(name, found.minima)
        return found

    def _blocks(self, tensor: GgufTensor, index: slice | NDArray[np.intp] | None) -> NDArray[np.uint8]:
        stored = np.frombuffer(self._mapped, np.uint8, tensor.stop - tensor.start, tensor.start)
        stored = stored.reshape(-1, tensor.row_bytes)
        return stored if index is None else stored[index]

    def _refuse_not_finite(self, name: str, values: NDArray[np.float32]) -> None:
        tensor = self.tensors[name]
        if not np.isfinite(values).all():
            kind = "value" if TYPES[tensor.type_id].is_float else "block scale"
            raise InvalidInput(
                f"{self.path}: tensor {quote_short(name)} ({tensor.type_name}) holds a {kind} that is not finite; "
                "the file is damaged"
            )

    def release(self, name: str) -> None:
        """Return the mapped pages of a tensor to the system; the next access reads them again."""
        tensor = self.tensors[name]
        release_pages(self._mapped, tensor.start, tensor.stop)


class _Header:
    """A cursor over the mapped file, bounded by its end and by `MAX_HEADER_BYTES`."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data = path, data
        self._at, self._end = 0, min(len(data), MAX_HEADER_BYTES)
        self._texts = 0

    def read(self) -> GgufFile:
        self._check_start()
        tensor_count = self._count("tensors", MAX_TENSORS)
        key_count = self._count("metadata keys", MAX_KEYS)
        metadata: dict[str, Value] = {}
        for _ in range(key_count):
            key = self._utf8("a metadata key", MAX_KEY_BYTES)
            if not key:
                raise self._refusal("a metadata key is empty")
            if key in metadata:
                raise self._refusal(f"the metadata key {quote_short(key)} occurs twice")
            metadata[key] = self._value(key)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or isinstance(alignment, bool):
            raise self._refusal(f"general.alignment: {quote_short(alignment)} is not a whole number")
        if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._refusal(f"general.alignment: {alignment} is not a power of two up to {MAX_ALIGNMENT:,}")
        infos = self._infos(tensor_count, alignment)
        base = -(-self._at // alignment) * alignment
        tensors = self._placed(infos, base, alignment)
        return GgufFile(self._path, metadata, tensors, self._at, self._data)

    def _check_start(self) -> None:
        if self._data[:4] != MAGIC:
            raise self._refusal(f"begins with {self._data[:4]!r} where a GGUF file has {MAGIC!r}")
        self._at = 4
        version = int(self._number("<I"))
        if version in VERSIONS:
            return
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise Unsupported(f"{self._path}: is a big-endian GGUF file; only little-endian ones are read")
        raise Unsupported(f"{self._path}: GGUF version {version}; versions 2 and 3 are read: convert the model again")

    def _infos(self, count: int, alignment: int) -> dict[str, tuple[int, tuple[int, ...], int]]:
        infos: dict[str, tuple[int, tuple[int, ...], int]] = {}
        for _ in range(count):
            name = self._utf8("a tensor's name", MAX_NAME_BYTES)
            if not name:
                raise self._refusal("a tensor's name is empty")
            if name in infos:
                raise self._refusal(f"the tensor {quote_short(name)} occurs twice")
            dimensions = int(self._number("<I"))
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise self._refusal(
                    f"tensor {quote_short(name)}: {dimensions} dimensions, where 1 to {MAX_DIMENSIONS} may be"
                )
            sizes = [int(self._number("<Q")) for _ in range(dimensions)]
            if not all(1 <= size <= MAX_DIMENSION for size in sizes):
                raise self._refusal(
                    f"tensor {quote_short(name)}: a dimension of {quote_short(sizes)} is not 1 to {MAX_DIMENSION:,}"
                )
            type_id, offset = int(self._number("<I")), int(self._number("<Q"))
            kind = TYPES.get(type_id)
            if kind is None:
                known = ", ".join(item.name for item in TYPES.values())
                name_of = REFUSED.get(type_id, f"number {type_id}")
                raise Unsupported(
                    f"{self._path}: tensor {quote_short(name)} is of type {name_of}, which is not read; read are "
                    f"{known}"
                )
            if sizes[0] % kind.values:
                raise self._refusal(
                    f"tensor {quote_short(name)}: rows of {sizes[0]:,} values are not whole {kind.name} blocks "
                    f"of {kind.values}"
                )
            if offset % alignment:
                raise self._refusal(f"tensor {quote_short(name)}: offset {offset:,} is not a multiple of {alignment}")
            infos[name] = (type_id, tuple(reversed(sizes)), offset)
        return infos

    def _placed(
        self, infos: Mapping[str, tuple[int, tuple[int, ...], int]], base: int, alignment: int
    ) -> dict[str, GgufTensor]:
        """Return every tensor with its bytes, in file order, after checking that none overlap or leave the file."""
        placed: dict[str, GgufTensor] = {}
        position, before, size = 0, "the header", len(self._data)
        for name, (type_id, shape, offset) in infos.items():
            kind = TYPES[type_id]
            needed = math.prod(shape) // kind.values * kind.bytes
            if offset != position:
                gap = "overlaps" if offset < position else "leaves a gap after"
                raise self._refusal(
                    f"tensor {quote_short(name)} at offset {offset:,} {gap} {quote_short(before)}, after which "
                    f"{position:,} is next"
                )
            stop = base + offset + needed
            if stop > size:
                raise InvalidInput(
                    f"{self._path}: tensor {quote_short(name)} ends at byte {stop:,}, beyond the file's {size:,}; "
                    "is it complete?"
                )
            placed[name] = GgufTensor(type_id, shape, base + offset, stop)
            position, before = -(-(offset + needed) // alignment) * alignment, name
        if size > base + position:
            raise self._refusal(f"{size - base - position:,} bytes stand after the last tensor, {quote_short(before)}")
        return placed

    def _value(self, key: str) -> Value:
        kind = int(self._number("<I"))
        if kind == _STRING:
            return self._utf8(key, MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._refusal(f"{quote_short(key)}: unknown type of value {kind}")
        value = self._number(_SCALARS[kind])
        if kind == _BOOL:
            if value not in (0, 1):
                raise self._refusal(f"{quote_short(key)}: {value} is not a truth value")
            return bool(value)
        # The shortest decimal of this float32: 1e-05, while the same value as a double prints 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def _array(self, key: str) -> Value:
        kind, count = int(self._number("<I")), int(self._number("<Q"))
        if kind == _STRING:
            return self._strings(key, count)
        if kind not in _SCALARS:
            what = "arrays inside an array" if kind == _ARRAY else f"unknown type of value {kind}"
            raise self._refusal(f"{quote_short(key)}: {what}")
        dtype = np.dtype(_SCALARS[kind])
        if count > MAX_ARRAY or count * dtype.itemsize > self._end - self._at:
            raise self._refusal(
                f"{quote_short(key)}: an array of {count:,} values does not fit the {self._end - self._at:,} bytes "
                f"that follow; at most {MAX_ARRAY:,} are read"
            )
        # A copy, so that closing the file does not wait for it; numbers take no more room than they do in the file.
        values = np.frombuffer(self._data, dtype, count, self._at).copy()
        self._at += count * dtype.itemsize
        if kind == _BOOL:
            if values.size and values.max() > 1:
                raise self._refusal(f"{quote_short(key)}: an array of truth values holds {values.max()}")
            return values.astype(np.bool_)
        return values

    def _strings(self, key: str, count: int) -> GgufStrings:
        self._texts += count
        if self._texts > MAX_TEXTS or count * 8 > self._end - self._at:
            raise self._refusal(
                f"{quote_short(key)}: an array of {count:,} texts does not fit the {self._end - self._at:,} bytes "
                f"that follow; at most {MAX_TEXTS:,} are read in all"
            )
        starts, lengths = array("Q"), array("H")
        data, at, end = self._data, self._at, self._end
        length_of = struct.Struct("<Q").unpack_from
        for index in range(count):
            if at + 8 > end:
                raise self._short(f"{key}[{index}]", 8)
            (length,) = length_of(data, at)
            at += 8
            if length > MAX_ITEM_BYTES or length > end - at:
                self._at = at
                raise self._refusal(
                    f"{quote_short(key)}: text {index:,} has {length:,} bytes, of which at most {MAX_ITEM_BYTES:,} "
                    f"are read "
                    f"and {end - at:,} are left"
                )
            starts.append(at)
            lengths.append(length)
            at += length
        self._at = at
        return GgufStrings(data, starts, lengths)

    def _utf8(self, what: str, limit: int) -> str:
        length = int(self._number("<Q"))
        if length > limit or length > self._end - self._at:
            raise self._refusal(
                f"{quote_short(what)}: a text of {length:,} bytes, where at most {limit:,} are read "
                f"and {self._end - self._at:,} are left"
            )
        data = self._data[self._at : self._at + length]
        self._at += length
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._refusal(f"{quote_short(what)}: {quote_short(data)} is not UTF-8") from error

    def _count(self, what: str, limit: int) -> int:
        count = int(self._number("<Q"))
        if count > limit:
            raise self._refusal(f"{count:,} {what}; at most {limit:,} are read")
        return count

    def _number(self, code: str) -> Any:
        size = struct.calcsize(code)
        if self._at + size > self._end:
            raise self._short("a number", size)
        (value,) = struct.unpack_from(code, self._data, self._at)
        self._at += size
        return value

    def _short(self, what: str, size: int) -> InvalidInput:
        return self._refusal(
            f"{quote_short(what)}: {size} bytes are needed and {max(0, self._end - self._at)} are left"
        )

    def _refusal(self, why: str) -> InvalidInput:
        return InvalidInput(f"{self._path}: offset {self._at:,}: {why}; is the file complete, and a GGUF file?")
