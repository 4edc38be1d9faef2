"""8-bit keys and values: in programs, in waiting states, and in segments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgekit_executorch.memory import CACHE, reading_bytes
from hypothesis import given, settings, strategies as st

pytest.importorskip("executorch")
pytest.importorskip("transformers")

import family_models as models
from edgekit_executorch.inspection import read_contents
from edgekit_executorch.int8_kv import Int8KV, close_gap, dequantise, quantise
from edgekit_executorch.layout import PROGRAM
from engines import Model, apart, program
from executorch_models import SHARED, SLOTS, engine_logits, logits_in_order

from edgekit.contracts.engine import Chunk, Engine, State
from edgekit.enginekit.rope_shift import RopeRotation, rotate_keys, rotation_back
from edgekit.errors import InvalidInput
from edgekit.planner.memory import load_of

pytestmark = [pytest.mark.executorch, pytest.mark.quantize]
slow = pytest.mark.slow

TOKENS = list(models.tokens_of(40))
HEADS, DIM = 2, 16


def wide_program() -> Model:
    return program("qwen2", layers=1, kv_bits=32, **SHARED)


@pytest.fixture(scope="module")
def int8_program() -> Model:
    """The same with an 8-bit cache."""
    return program("qwen2", layers=1, kv_bits=8, **SHARED)


def keys_of(seed: int, tokens: int) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(seed)
    reach = 10 ** random.uniform(-3, 2, (HEADS, tokens, 1))
    return ((random.normal(size=(HEADS, tokens, DIM)) + random.normal(size=DIM)) * reach).astype(np.float32)


def turn_of(angle: float) -> RopeRotation:
    return rotation_back(np.linspace(0, angle, DIM // 2), list(range(DIM // 2)), list(range(DIM // 2, DIM)))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 30), st.integers(1, 40))
def test_each_token_of_a_head_has_its_scale(seed: int, tokens: int) -> None:
    keys = keys_of(seed, tokens)
    keys[:, 0] = 0
    found = quantise(keys)
    assert [array.dtype for array in found] == [np.int8, np.float32, np.int8]
    reach = np.maximum(keys.max(-1, keepdims=True), 0) - np.minimum(keys.min(-1, keepdims=True), 0)
    assert (np.abs(dequantise(found) - keys) <= 0.502 * reach / 255 + 1e-30).all()
    assert (dequantise(found)[:, 0] == 0).all()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 30), st.integers(1, 60), st.data())
def test_close_gap_rotates_and_rounds_once(seed: int, tokens: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, tokens))
    stop, turn = data.draw(st.integers(start, tokens)), turn_of(data.draw(st.floats(-20, 20)))
    before = quantise(keys_of(seed, tokens))
    for given_turn in (turn, None):
        arrays = [array.copy() for array in before]
        close_gap(arrays, start, stop, tokens, given_turn)
        kept, moved = Int8KV(*(array[:, :start] for array in arrays)), tokens - stop
        found = Int8KV(*(array[:, start : start + moved] for array in arrays))
        for array, old in zip(kept, before, strict=True):
            np.testing.assert_array_equal(array, old[:, :start])
        was = Int8KV(*(array[:, stop:] for array in before))
        if given_turn is None:
            for array, old in zip(found, was, strict=True):
                np.testing.assert_array_equal(array, old)
        elif moved and stop > start:
            expected = rotate_keys(dequantise(was), turn)
            step = np.abs(expected).max(-1, keepdims=True) * 2 / 255
            assert (np.abs(dequantise(found) - expected) <= 0.51 * step + 1e-30).all()


@slow
def test_state_bytes_equal_plan(int8_program: Model) -> None:
    model, tokens = int8_program.plan.model, SLOTS
    engine = int8_program.open()
    expected = CACHE.state_bytes(model, tokens, 8)
    assert engine.state_bytes(engine.plan.storage) == expected == 2 * HEADS * (DIM + 5) * SLOTS
    state = engine.start(engine.plan.storage)
    assert sum(array.nbytes for array in engine._swap.arrays(state)) == state.bytes == expected
    planned = read_contents(int8_program.files / PROGRAM).arenas
    assert all(arena[1] == expected for arena in (planned["append"], planned["step"]))
    added = planned["append"][0] - read_contents(wide_program().files / PROGRAM).arenas["append"][0]
    assert 0 < added <= 1.2 * reading_bytes(load_of(int8_program.plan)._replace(held_tokens=tokens, kv_bits=8))
    engine.close()


@slow
def test_int8_kv_program_equals_sums_in_order_bitwise(int8_program: Model) -> None:
    engine = int8_program.open()
    found = engine_logits(engine, TOKENS)
    engine.close()
    assert np.array_equal(found, logits_in_order(int8_program, TOKENS))


def fed(engine: Engine, tokens: list[int]) -> tuple[State, np.ndarray[Any, Any]]:
    state, found = engine.start(engine.plan.storage), []  # type: ignore[attr-defined]
    for start in range(0, len(tokens), 16):
        piece = tokens[start : start + 16]
        found.append(engine.forward([Chunk(state, piece, len(piece))])[0])
    return state, np.concatenate(found)


@slow
def test_int8_kv_is_close_to_floats_after_evictions(int8_program: Model) -> None:
    fp32 = wide_program().open()
    small = int8_program.open()
    assert small.capabilities.kv_bits == (8,) and fp32.capabilities.kv_bits == (32,)
    (one, expected), (other, found) = fed(fp32, TOKENS), fed(small, TOKENS)
    assert 0 < apart(found, expected) < 0.08
    for _ in range(5):
        one.evict(4, 9)
        other.evict(4, 9)
        expected, found = (engine.forward([Chunk(state, TOKENS[:5], 5)])[0] for engine, state in
                           ((fp32, one), (small, other)))  # fmt: skip
        assert apart(found, expected) < 0.08
    fp32.close()
    small.close()


@slow
def test_int8_kv_segment_survives_a_file_bitwise(int8_program: Model, tmp_path: Path) -> None:
    engine = int8_program.open(exact=True)
    state, _ = fed(engine, TOKENS[:23])
    segment = state.save(0, 23)
    assert segment.bytes == 23 * engine.state_bytes(engine.plan.storage) // SLOTS
    segment.write(tmp_path / "kept")
    expected = engine.forward([Chunk(state, TOKENS[23:30], 7)])[0]
    state.close()
    again = engine.start(engine.plan.storage)
    again.restore(engine.read_segment(tmp_path / "kept"))
    np.testing.assert_array_equal(engine.forward([Chunk(again, TOKENS[23:30], 7)])[0], expected)
    engine.close()
    fp32 = wide_program().open()
    with pytest.raises(InvalidInput, match="not saved by this model"):
        fp32.start(fp32.plan.storage).restore(segment)
    with pytest.raises(InvalidInput, match="another model, artifact or adapter"):
        fp32.read_segment(tmp_path / "kept")
    fp32.close()
