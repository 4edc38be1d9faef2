"""The tensors of a GGUF model under their Hugging Face names, from one file or all of its parts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edgekit.errors import InvalidInput, quote_short
from edgekit.formats.gguf import GgufFile
from edgekit.formats.gguf_types import TYPES
from edgekit.formats.int_packing import DerivedEntry, IntegerFormat, IntegerRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_SHARDS = 1 << 10
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class TensorView(NamedTuple):
    """The conversion of a stored tensor to a Hugging Face tensor.

    `heads` above 0: the rows of each head are stored in pairs (0, d/2, 1, d/2 + 1, …), as llama.cpp's interleaved rope
    needs them, and are reordered. `offset` is added to every value.
    """

    source: str
    heads: int = 0
    offset: float = 0.0


class GgufTensors(AbstractContextManager["GgufTensors"]):
    """The tensors of a GGUF model under Hugging Face's names, as float32; rows are dequantised on access.

    Has the methods of `TensorFolder` that quantisers and references use.
    """

    def __init__(self, shards: Sequence[GgufFile], views: Mapping[str, TensorView]) -> None:
        self._shards, self._views = shards, views
        self._shard_of = {name: shard for shard in shards for name in shard.tensors}
        self.files = {shard.path.name: shard.path for shard in shards}
        self.entries = {name: self._entry(view) for name, view in views.items()}
        self.integer_formats = {name: found for name, view in views.items() if (found := self._integer_format(view))}

    def _entry(self, view: TensorView) -> DerivedEntry:
        tensor = self._shard_of[view.source].tensors[view.source]
        return DerivedEntry("F32" if view.offset else tensor.type_name, tensor.shape, tensor.stop - tensor.start)

    def _integer_format(self, view: TensorView) -> IntegerFormat | None:
        tensor = self._shard_of[view.source].tensors[view.source]
        is_matrix = len(tensor.shape) == 2 and not view.offset
        return TYPES[tensor.type_id].integer_format if is_matrix else None

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files."""
        for shard in self._shards:
            shard.close()

    def entry(self, name: str) -> DerivedEntry:
        """Return the type and shape of a tensor. Raises `InvalidInput` for a missing one."""
        try:
            return self.entries[name]
        except KeyError:
            where = self._shards[0].path
            raise InvalidInput(f"{where}: tensor {quote_short(name)} is missing; is the model complete?") from None

    def floats(self, name: str, rows: slice | None = None) -> NDArray[np.float32]:
        """Return a tensor, or some of its rows, as float32."""
        shape, view = self.entry(name).shape, self._views[name]
        shard = self._shard_of[view.source]
        order = _in_halves(shape[0], view.heads) if view.heads else None
        if len(shape) == 1:
            values = shard.rows(view.source)[0]
            values = values if order is None else values[order]
            values = values if rows is None else values[rows]
        else:
            selected = slice(None) if rows is None else rows
            inner = math.prod(shape[1:-1])  # GGUF rows in one row of ours: 1 for a matrix
            if inner != 1:
                start, stop, _ = selected.indices(shape[0])
                selected, order = slice(start * inner, stop * inner), None
            values = shard.rows(view.source, selected if order is None else order[selected]).reshape(-1, *shape[1:])
        if view.offset:
            values = values + np.float32(view.offset)
        return np.ascontiguousarray(values)

    def integers(self, name: str, rows: slice | None = None) -> IntegerRows:
        """Return the integers and scales of a matrix in `integer_formats`, or of some of its rows."""
        shape, view = self.entry(name).shape, self._views[name]
        selected = slice(None) if rows is None else rows
        index = _in_halves(shape[0], view.heads)[selected] if view.heads else selected
        return self._shard_of[view.source].integers(view.source, index)

    def release(self, name: str) -> None:
        """Return the mapped pages of a tensor to the system; the next access reads them again."""
        source = self._views[name].source
        self._shard_of[source].release(source)


def _in_halves(rows: int, heads: int) -> NDArray[np.intp]:
    """Return the stored row index (order of pairs) of each row in the order of halves: 0 … d/2 - 1, d/2 … d - 1."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def open_shards(path: Path) -> list[GgufFile]:
    """Open all files of a model: `path` alone, or every part in order if it is named `…-00001-of-000NN.gguf`."""
    match = _SHARD.fullmatch(path.name)
    first = GgufFile.open(path)
    files = [first]
    try:
        count, number = _whole(first, "split.count", 1), _whole(first, "split.no", 0)
        if count in (0, 1):
            return files
        if match is None or int(match["count"]) != count or count > MAX_SHARDS:
            raise InvalidInput(
                f"{path}: is one of {quote_short(count)} parts and is not named like one (…-00001-of-000NN.gguf); "
                "give all parts their names back"
            )
        if number != 0 or int(match["number"]) != 1:
            raise InvalidInput(
                f"{path}: is part {match['number']} of {count}; give the first, …-00001-of-{count:05d}.gguf"
            )
        for index in range(1, count):
            part = path.with_name(f"{match['stem']}-{index + 1:05d}-of-{count:05d}.gguf")
            if not part.exists():
                raise InvalidInput(f"{part}: is missing; put all {count} parts into one folder")
            files.append(GgufFile.open(part))
            stated = (_whole(files[-1], "split.no", 0), _whole(files[-1], "split.count", 0))
            if stated != (index, count):
                raise InvalidInput(
                    f"{part}: says that it is part {quote_short(stated[0])} of {quote_short(stated[1])}; is it renamed?"
                )
        _check_parts(files)
    except BaseException:
        for shard in files:
            shard.close()
        raise
    return files


def _check_parts(shards: Sequence[GgufFile]) -> None:
    seen: dict[str, Path] = {}
    for shard in shards:
        for name in shard.tensors:
            if name in seen:
                raise InvalidInput(f"{shard.path}: tensor {quote_short(name)} is in {seen[name].name} too")
            seen[name] = shard.path
    stated = _whole(shards[0], "split.tensors.count", len(seen))
    if stated != len(seen):
        raise InvalidInput(f"{shards[0].path}: {stated:,} tensors are stated and {len(seen):,} are there")


def _whole(shard: GgufFile, key: str, default: int) -> int:
    value = shard.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInput(f"{shard.path}: {key}: {quote_short(value)} is not a whole number; split the model again")
    return value


def stem_of(path: Path) -> str:
    """Return the name of a model's file without suffix and part number."""
    match = _SHARD.fullmatch(path.name)
    return match["stem"] if match else path.stem
