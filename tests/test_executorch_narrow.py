"""Keys and values in 8 bits: in programs, beside them, and in what is kept of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("executorch")
pytest.importorskip("transformers")

import family_models as models
from edgekit_executorch.inspection import read_contents
from edgekit_executorch.layout import PROGRAM
from edgekit_executorch.narrow import Narrow, close, rounded, widened
from edgekit_executorch.offers import offers
from executorch_models import SLOTS, Made, apart, program, spoken, spoken_in_order, usual

from edgekit.errors import InvalidInput
from edgekit.interfaces import Chunk, Engine, State
from edgekit.memory import cache_bytes, widened_bytes
from edgekit.profiles import load_profile
from edgekit.rotation import Turn, turned
from edgekit.testing import check_engine

pytestmark = [pytest.mark.executorch, pytest.mark.quantize]
slow = pytest.mark.slow

TOKENS = list(models.tokens_of(40))
HEADS, DIM = 2, 16


@pytest.fixture(scope="module")
def narrow() -> Made:
    """As `usual`, and in 8 bits."""
    return program("qwen2", "s4-g32", exits=(1,), kv_bits=8)


@pytest.fixture(scope="module")
def windowed() -> Made:
    """Soft caps and windows, in floats but for the cache."""
    return program("gemma2", "float32", kv_bits=8)


def keys_of(seed: int, tokens: int) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(seed)
    reach = 10 ** random.uniform(-3, 2, (HEADS, tokens, 1))
    return ((random.normal(size=(HEADS, tokens, DIM)) + random.normal(size=DIM)) * reach).astype(np.float32)


def turn_of(angle: float) -> Turn:
    angles = np.linspace(0, angle, DIM // 2)
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return Turn(np.concatenate([cosines, cosines]), np.concatenate([sines, -sines]))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 30), st.integers(1, 40))
def test_each_token_of_a_head_is_rounded_by_its_own_reach(seed: int, tokens: int) -> None:
    keys = keys_of(seed, tokens)
    keys[:, 0] = 0
    found = rounded(keys)
    assert [array.dtype for array in found] == [np.int8, np.float32, np.int8]
    reach = np.maximum(keys.max(-1, keepdims=True), 0) - np.minimum(keys.min(-1, keepdims=True), 0)
    assert (np.abs(widened(found) - keys) <= 0.502 * reach / 255 + 1e-30).all()
    assert (widened(found)[:, 0] == 0).all()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 30), st.integers(1, 60), st.data())
def test_a_gap_closes_by_turning_what_is_kept_and_rounding_it_once(seed: int, tokens: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, tokens))
    stop, turn = data.draw(st.integers(start, tokens)), turn_of(data.draw(st.floats(-20, 20)))
    before = rounded(keys_of(seed, tokens))
    for given_turn in (turn, None):
        arrays = [array.copy() for array in before]
        close(arrays, start, stop, tokens, given_turn)
        kept, moved = Narrow(*(array[:, :start] for array in arrays)), tokens - stop
        found = Narrow(*(array[:, start : start + moved] for array in arrays))
        for array, old in zip(kept, before, strict=True):
            np.testing.assert_array_equal(array, old[:, :start])
        was = Narrow(*(array[:, stop:] for array in before))
        if given_turn is None:
            for array, old in zip(found, was, strict=True):
                np.testing.assert_array_equal(array, old)
        elif moved and stop > start:
            expected = turned(widened(was), turn)
            step = np.abs(expected).max(-1, keepdims=True) * 2 / 255
            assert (np.abs(widened(found) - expected) <= 0.51 * step + 1e-30).all()


@slow
def test_a_state_takes_what_is_planned_to_the_byte_and_the_program_no_more(narrow: Made) -> None:
    model, tokens = narrow.plan.model, SLOTS
    facts = next(offer.memory for offer in offers(model, load_profile("pixel-9")) if offer.backend == "xnnpack")
    engine = narrow.open()
    expected = cache_bytes(model, tokens, 8, facts)
    assert engine.state_bytes(engine.plan.storage) == expected == 2 * 2 * HEADS * (DIM + 5) * SLOTS
    state = engine.start(engine.plan.storage)
    assert sum(array.nbytes for array in engine.seats.arrays(state)) == state.bytes == expected
    planned = read_contents(narrow.files / PROGRAM).arenas
    assert all(arena[1] == expected for arena in (planned["forward"], planned["step"]))
    beside = planned["forward"][0] - read_contents(usual().files / PROGRAM).arenas["forward"][0]
    assert 0 < beside <= 1.2 * widened_bytes(model, tokens, 8, facts)
    engine.close()


@slow
def test_a_program_says_to_the_bit_what_sums_and_roundings_in_order_say(narrow: Made) -> None:
    engine = narrow.open()
    found = spoken(engine, TOKENS)
    engine.close()
    assert np.array_equal(found, spoken_in_order(narrow, TOKENS))


@slow
def test_an_engine_on_8_bits_keeps_every_promise(narrow: Made) -> None:
    check_engine(narrow.open, exact=False, tolerance=0.05, sequences=40)


@slow
def test_an_engine_on_8_bits_keeps_every_promise_to_the_bit_in_exact_mode(narrow: Made) -> None:
    check_engine(lambda: narrow.open(exact=True), exact=True, tolerance=0.05, sequences=40)


@slow
def test_soft_caps_and_windows_go_with_8_bits(windowed: Made) -> None:
    check_engine(windowed.open, exact=False, tolerance=0.03, sequences=20)


def fed(engine: Engine, tokens: list[int]) -> tuple[State, np.ndarray[Any, Any]]:
    state, found = engine.start(engine.plan.storage), []  # type: ignore[attr-defined]
    for start in range(0, len(tokens), 16):
        piece = tokens[start : start + 16]
        found.append(engine.forward([Chunk(state, piece, len(piece))])[0])
    return state, np.concatenate(found)


@slow
def test_8_bits_say_nearly_what_floats_say_after_evictions_too(narrow: Made) -> None:
    wide = usual().open()
    small = narrow.open()
    assert small.abilities.kv_bits == (8,) and wide.abilities.kv_bits == (32,)
    (one, expected), (other, found) = fed(wide, TOKENS), fed(small, TOKENS)
    assert 0 < apart(found, expected) < 0.08
    for _ in range(5):
        one.evict(4, 9)
        other.evict(4, 9)
        expected, found = (engine.forward([Chunk(state, TOKENS[:5], 5)])[0] for engine, state in
                           ((wide, one), (small, other)))  # fmt: skip
        assert apart(found, expected) < 0.08
    wide.close()
    small.close()


@slow
def test_what_was_kept_goes_on_bit_for_bit_through_a_file_and_nowhere_else(narrow: Made, tmp_path: Path) -> None:
    engine = narrow.open(exact=True)
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
    wide = usual().open()
    with pytest.raises(InvalidInput, match="not saved by this model"):
        wide.start(wide.plan.storage).restore(segment)
    with pytest.raises(InvalidInput, match="another model, artifact or adapter"):
        wide.read_segment(tmp_path / "kept")
    wide.close()
