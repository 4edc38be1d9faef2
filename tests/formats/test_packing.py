"""Packing is exact for every allowed shape and value, and gives the bytes that other libraries expect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgekit.formats.int_packing import bf16_to_float32, float32_to_bf16, pack, row_bytes, unpack


def integers(bits: int) -> st.SearchStrategy[Any]:
    half = 1 << (bits - 1)
    shape = st.tuples(st.integers(0, 9), st.integers(1, 70))
    return arrays(np.int8, shape, elements=st.integers(-half, half - 1))


@settings(max_examples=150, deadline=None)
@given(values=integers(4))
def test_four_bit_values_round_trip(values: Any) -> None:
    packed = pack(values, 4)
    assert packed.shape == (values.shape[0], row_bytes(values.shape[1], 4))
    assert (unpack(packed, 4, values.shape[1]) == values).all()


@settings(max_examples=150, deadline=None)
@given(values=integers(8))
def test_eight_bit_values_round_trip(values: Any) -> None:
    packed = pack(values, 8)
    assert packed.shape == (values.shape[0], row_bytes(values.shape[1], 8))
    assert (unpack(packed, 8, values.shape[1]) == values).all()


def test_the_first_value_is_in_the_low_nibble() -> None:
    assert pack(np.array([[-8, 7, 0, -1]], np.int8), 4).tolist() == [[0xF0, 0x78, 0, 0]]
    assert pack(np.array([[-128, 127, 0]], np.int8), 8).tolist() == [[0, 255, 128, 0]]


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
