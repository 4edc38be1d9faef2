"""Removes duplicate bytes from a program's file: a tied head in a part of XNNPACK equals the token embedding.

ExecuTorch writes its constants and the named data of backends as separate segments of the file. Both are
found through offsets, and segments may overlap. So if a named segment has the bytes of a constant, its offset is set to
the constant, and its own bytes are cut out of the file.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from edgekit_executorch.flatbuffer import Flat, sound
from edgekit_executorch.inspection import SEGMENTS_SIZE_AT, layout_of

# Field numbers of ExecuTorch's schema, program.fbs.
_SEGMENTS, _CONSTANTS, _NAMED = 4, 5, 7
# Multiples of this are cut out, so that every segment keeps its alignment.
_PAGE = 4096
_PIECE_BYTES = 16 << 20


class _Segment(NamedTuple):
    """One segment; `place` is where the file stores its offset."""

    place: int
    offset: int
    size: int


def share_constants(path: Path) -> int:
    """Rewrite the program at `path` so that named data equal to a constant is stored once; return the bytes saved."""
    written = path.with_name(f"{path.name}.sharing")
    with sound(path) as data:
        flat, base = layout_of(path, data)
        shared = dict(_shared(data, flat, base))
        if not shared:
            return 0
        cuts = [(segment.offset, segment.size // _PAGE * _PAGE) for segment in shared]
        head = bytearray(data[:base])
        for segment in _segments(flat):
            moved = shared.get(segment)
            if moved is None:
                moved = segment.offset - sum(size for start, size in cuts if start < segment.offset)
            if moved != segment.offset:
                struct.pack_into("<Q", head, segment.place, moved)
        saved = sum(size for _, size in cuts)
        (segments_size,) = struct.unpack_from("<Q", head, SEGMENTS_SIZE_AT)
        struct.pack_into("<Q", head, SEGMENTS_SIZE_AT, segments_size - saved)
        with written.open("wb") as file:
            file.write(head)
            start = base
            for offset, size in [*sorted(cuts), (len(data) - base, 0)]:
                for piece in range(start, base + offset, _PIECE_BYTES):
                    file.write(data[piece : min(piece + _PIECE_BYTES, base + offset)])
                start = base + offset + size
    written.replace(path)
    return saved


def _segments(flat: Flat) -> Iterator[_Segment]:
    for table in flat.tables(flat.root(), _SEGMENTS):
        yield _Segment(flat.place(table, 0) or 0, flat.number(table, 0, "Q"), flat.number(table, 1, "Q"))


def _shared(data: mmap.mmap, flat: Flat, base: int) -> Iterator[tuple[_Segment, int]]:
    """Yield named segments of at least a page that equal a constant, each with the constant's offset."""
    program, segments = flat.root(), list(_segments(flat))
    constants = flat.table(program, _CONSTANTS)
    if constants is None:
        return
    holder = segments[flat.number(constants, 0)]
    offsets = sorted(set(flat.numbers(constants, 1, "Q")))
    sizes = [stop - start for start, stop in zip(offsets, [*offsets[1:], holder.size], strict=True)]
    for index in sorted({flat.number(entry, 1) for entry in flat.tables(program, _NAMED)}):
        segment = segments[index]
        is_shared = holder.offset <= segment.offset < holder.offset + holder.size
        if segment.size < _PAGE or is_shared:
            continue
        for offset, size in zip(offsets, sizes, strict=True):
            constant = holder.offset + offset
            if segment.size <= size and _are_equal(data, base + segment.offset, base + constant, segment.size):
                yield segment, constant
                break


def _are_equal(data: mmap.mmap, one: int, other: int, size: int) -> bool:
    for start in range(0, size, _PIECE_BYTES):
        count = min(_PIECE_BYTES, size - start)
        if data[one + start : one + start + count] != data[other + start : other + start + count]:
            return False
    return True
