"""Chunks of files: aligned with tensors, and independent of bytes that are inserted before them."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path

import numpy as np

from edgekit.formats.chunking import cut_file
from edgekit.formats.safetensors import TensorBytes
from edgekit.formats.safetensors_writer import TensorWriter


def pieces(path: Path, tensors: list[TensorBytes] | None = None) -> list[bytes]:
    data, sizes = path.read_bytes(), cut_file(path, tensors or [])
    assert sum(sizes) == len(data)
    return [data[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def test_large_tensors_begin_chunks_and_small_ones_follow_in_them(tmp_path: Path) -> None:
    path, sizes = tmp_path / "weights.bin", [5_000, 1_000, 900, 3_000_000, 4_096, 100]
    path.write_bytes(random.Random(0).randbytes(sum(sizes)))
    ends = list(accumulate(sizes))
    found = pieces(path, [TensorBytes(path, end - size, size) for size, end in zip(sizes, ends, strict=True)])
    cuts = set(accumulate(map(len, found)))
    assert {6_900, 3_006_900, 3_011_096} <= cuts
    assert not cuts & {5_000, 6_000, 3_010_996}
    large = [len(piece) for piece in found[1:-1]]
    assert sum(large) == 3_000_000 and len(large) > 3 and max(large) <= 1 << 20
    assert cut_file(path, []) != [len(piece) for piece in found]


def test_many_small_tensors_have_a_chunk_of_their_own(tmp_path: Path) -> None:
    path, sizes = tmp_path / "weights.bin", [5_000, 3_000, 3_000, 3_000, 8_000]
    path.write_bytes(random.Random(0).randbytes(sum(sizes)))
    places = [TensorBytes(path, end - size, size) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    assert [len(piece) for piece in pieces(path, places)] == [5_000, 9_000, 8_000]


def test_tensors_of_a_module_share_a_chunk(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    shapes = {"a.weight": 40_000, "a.scales": 5_000, "b.weight": 40_000, "b.scales": 100, "c.scales": 5_000}
    with TensorWriter(path, {name: ("U8", (size,)) for name, size in shapes.items()}) as writer:
        for name, size in shapes.items():
            writer.write(name, np.frombuffer(random.Random(name).randbytes(size), np.uint8))
        writer.seal()
    header = path.stat().st_size - sum(shapes.values())
    assert [len(piece) for piece in pieces(path)] == [header, 45_000, 40_100, 5_000]


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
