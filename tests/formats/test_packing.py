"""Packed integers, bfloat16 and the chunks of files."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

from edgekit.formats.chunking import cut_file
from edgekit.formats.int_packing import bf16_to_float32, float32_to_bf16, pack, row_bytes, unpack
from edgekit.formats.safetensors import TensorBytes
from edgekit.formats.safetensors_writer import TensorWriter


def integers(bits: int) -> st.SearchStrategy[Any]:
    half = 1 << (bits - 1)
    shape = st.tuples(st.integers(0, 9), st.integers(1, 70))
    return arrays(np.int8, shape, elements=st.integers(-half, half - 1))


@pytest.mark.parametrize("bits", [3, 4, 8])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_values_round_trip(bits: int, data: st.DataObject) -> None:
    values = data.draw(integers(bits))
    packed = pack(values, bits)
    assert packed.shape == (values.shape[0], row_bytes(values.shape[1], bits))
    assert (unpack(packed, bits, values.shape[1]) == values).all()


def test_the_first_value_is_in_the_low_nibble() -> None:
    assert pack(np.array([[-8, 7, 0, -1]], np.int8), 4).tolist() == [[0xF0, 0x78, 0, 0]]
    assert pack(np.array([[-128, 127, 0]], np.int8), 8).tolist() == [[0, 255, 128, 0]]
    assert pack(np.array([[-3, 3, -4, -4]], np.int8), 3).tolist() == [[0b111001, 0, 0, 0]]


def test_a_value_out_of_range_is_an_assertion() -> None:
    with pytest.raises(AssertionError, match="outside"):
        pack(np.array([[8]], np.int8), 4)


@pytest.mark.quantize
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inputs", [32, 96, 128, 37])
def test_compressed_tensors_writes_the_same_bytes(bits: int, inputs: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    torch = pytest.importorskip("torch")
    half = 1 << (bits - 1)
    values = np.random.default_rng(0).integers(-half, half, (6, inputs)).astype(np.int8)
    theirs = helpers.pack_to_int32(torch.from_numpy(values), bits).numpy()
    assert (pack(values, bits).view(np.int32) == theirs).all()


@settings(max_examples=200, deadline=None)
@given(bits=st.integers(0, 0xFFFF))
def test_every_bfloat16_round_trips(bits: int) -> None:
    stored = np.array([bits], np.uint16)
    value = bf16_to_float32(stored)
    again = float32_to_bf16(value)
    assert np.isnan(value[0]) or again[0] == stored[0]


@settings(max_examples=200, deadline=None)
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_rounding_to_bfloat16_is_that_of_torch(value: float) -> None:
    torch = pytest.importorskip("torch")
    if abs(value) > 3.38e38:
        return  # rounds to infinity
    ours = bf16_to_float32(float32_to_bf16(np.array([value], np.float32)))
    assert ours[0] == torch.tensor([value], dtype=torch.float32).bfloat16().float()[0]


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
