"""Cuts files into content-defined chunks that are aligned with tensors.

A large tensor begins a chunk, so a changed one changes only its own chunks. A tensor of a module that follows another
of the same one, such as its scales, and small tensors share the chunk of the large one before them, because every chunk
costs a hash in the manifest. Inside a tensor, and in files without known tensors, a rolling hash of the last 32 bytes
decides, so inserted bytes move no later cut.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edgekit.common.files import open_regular
from edgekit.formats.gguf import GgufFile
from edgekit.formats.safetensors import TensorBytes, read_header

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WINDOW = 32  # bytes in the rolling hash
_BLOCK = 4 << 20
_OWN_CHUNK_BYTES = 3 << 10  # tensors of at least this size begin a chunk, and so do as many bytes of smaller ones


class _Grain(NamedTuple):
    """Minimum and maximum bytes of a chunk; a hash whose masked bits are zero (1 in `mask + 1`) ends a chunk."""

    fewest: int
    most: int
    mask: int


_TENSORS = _Grain(512 << 10, 1 << 20, (256 << 10) - 1)
_OTHERS = _Grain(16 << 10, 256 << 10, (64 << 10) - 1)


def cut_file(path: Path, tensors: Sequence[TensorBytes] = ()) -> list[int]:
    """Return the sizes of a file's chunks. `tensors`: byte ranges of tensors, for formats that are not known here.

    The same bytes and ranges always give the same chunks.
    """
    size = path.stat().st_size
    if size == 0:
        return []
    places = [each for each in tensors if each.path == path] or _tensors_of(path)
    edges = sorted({0, size, *_edges(places, size)})
    grain = _TENSORS if places else _OTHERS
    with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cuts = [cut for start, stop in pairwise(edges) for cut in _cuts(data, start, stop, grain)]
    return [stop - start for start, stop in pairwise([0, *cuts])]


def places_of_modules(tensors: Iterable[tuple[str, TensorBytes]]) -> list[TensorBytes]:
    """Return the byte ranges of named tensors, as one range where tensors of a module follow each other."""
    places: list[TensorBytes] = []
    before: tuple[str, Path] | None = None
    for name, place in sorted(tensors, key=lambda each: (each[1].path, each[1].offset)):
        module = (name.rpartition(".")[0] or name, place.path)
        if module == before:
            start = places[-1].offset
            places[-1] = place._replace(offset=start, length=place.offset + place.length - start)
        else:
            places.append(place)
        before = module
    return places


def _tensors_of(path: Path) -> list[TensorBytes]:
    if path.suffix == ".safetensors":
        header = read_header(path)
        return places_of_modules((name, TensorBytes(path, each.start, each.bytes)) for name, each in header.items())
    if path.suffix == ".gguf":
        with GgufFile.open(path) as file:
            return [TensorBytes(path, each.start, each.stop - each.start) for each in file.tensors.values()]
    return []


def _edges(places: Sequence[TensorBytes], size: int) -> Iterator[int]:
    large = sorted(
        (place.offset, place.offset + place.length)
        for place in places
        if place.length >= _OWN_CHUNK_BYTES and place.offset + place.length <= size
    )
    for (start, stop), (following, _) in pairwise([*large, (size, size)]):
        yield start
        if following - stop >= _OWN_CHUNK_BYTES:
            yield stop


def _cuts(data: mmap.mmap, start: int, stop: int, grain: _Grain) -> Iterator[int]:
    """Yield the ends of the chunks between two tensor bounds; the last one is `stop`."""
    begin = start
    if stop - begin > grain.fewest:
        for place in _hash_places(data, start, stop, grain.mask):
            while place - begin > grain.most:
                begin += grain.most
                yield begin
            if place - begin >= grain.fewest and stop - place >= _WINDOW:
                begin = place
                yield begin
    while stop - begin > grain.most:
        begin += grain.most
        yield begin
    yield stop


def _hash_places(data: mmap.mmap, start: int, stop: int, mask: int) -> Iterator[int]:
    """Yield the offsets at which the masked hash of the preceding `_WINDOW` bytes, none before `start`, is zero."""
    for block in range(start, stop, _BLOCK):
        first = max(start, block - _WINDOW + 1)
        last = min(stop, block + _BLOCK)
        hashes = _rolling(np.frombuffer(data[first:last], np.uint8))
        hashes[: min(len(hashes), block - first)] = 1  # handled with the previous block
        hashes[: max(0, start + _WINDOW - 1 - first)] = 1  # fewer bytes than the window
        yield from (first + 1 + int(index) for index in np.flatnonzero((hashes & np.uint32(mask)) == 0))


def _rolling(values: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the gear hash at every offset: the sum over the last 32 bytes of number << distance, modulo 2**32."""
    hashes: Any = _numbers()[values]
    width = 1
    while width < _WINDOW:
        hashes[width:] = hashes[width:] + (hashes[:-width] << np.uint32(width))
        width *= 2
    return hashes  # type: ignore[no-any-return]


@cache
def _numbers() -> NDArray[np.uint32]:
    """Return a pseudo-random number for each byte value. Changing them would change all chunks."""
    digests = (hashlib.sha256(b"edgekit chunk %d" % byte).digest()[:4] for byte in range(256))
    return np.frombuffer(b"".join(digests), "<u4").astype(np.uint32)
