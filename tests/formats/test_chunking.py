"""Chunks of files: aligned with tensors, and independent of bytes that are inserted before them."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path

from edgekit.formats.chunking import cut_file
from edgekit.formats.safetensors import TensorBytes


def pieces(path: Path, tensors: list[TensorBytes] | None = None) -> list[bytes]:
    data, sizes = path.read_bytes(), cut_file(path, tensors or [])
    assert sum(sizes) == len(data)
    return [data[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def test_tensors_begin_and_end_chunks_and_small_neighbours_share_one(tmp_path: Path) -> None:
    path, sizes = tmp_path / "weights.bin", [5_000, 1_000, 900, 3_000_000, 4_096, 100]
    path.write_bytes(random.Random(0).randbytes(sum(sizes)))
    ends = list(accumulate(sizes))
    found = pieces(path, [TensorBytes(path, end - size, size) for size, end in zip(sizes, ends, strict=True)])
    cuts = set(accumulate(map(len, found)))
    assert {5_000, 6_900, 3_006_900, 3_010_996, 3_011_096} <= cuts
    assert not cuts & {6_000}
    large = [len(piece) for piece in found[2:-2]]
    assert sum(large) == 3_000_000 and len(large) > 3 and max(large) <= 1 << 20
    assert cut_file(path, []) != [len(piece) for piece in found]


def test_insertion_changes_only_the_chunks_around_it(tmp_path: Path) -> None:
    path, data = tmp_path / "text.json", random.Random(1).randbytes(2_000_000)
    path.write_bytes(data)
    before = pieces(path)
    path.write_bytes(data[:700_000] + b"inserted" + data[700_000:])
    assert sum(len(piece) for piece in set(pieces(path)) - set(before)) <= 2 * (256 << 10)
    assert pieces(path) == pieces(path)


def test_empty_and_short_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert cut_file(path) == []
    path.write_bytes(b"a")
    assert cut_file(path) == [1]
