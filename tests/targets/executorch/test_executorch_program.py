"""Lowered programs: their logits, their contents, and the facts that they state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("executorch")
pytest.importorskip("transformers")

import family_models as models
import torch
from edgekit_executorch.decoder import Append
from edgekit_executorch.inspection import read_contents
from edgekit_executorch.layout import FORWARD, PROGRAM, description
from edgekit_executorch.program import LoadedProgram
from edgekit_executorch.quiet import quiet_output
from engines import Model, apart, program
from executorch_models import SHARED, SLOTS, decoder_of, engine_logits, logits_in_order, reference_logits, usual

from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.errors import EdgekitError, InvalidInput, Unsupported

pytestmark = [pytest.mark.executorch, pytest.mark.quantize, pytest.mark.slow]

TOKENS = list(models.tokens_of(40))
UNSEEN = -1e30


@pytest.fixture(scope="session")
def made() -> dict[str, Model]:
    """The usual program, and one of floats with windows."""
    return {"qwen2": usual(), "gemma3": program("gemma3", "float32", kv_bits=32, **SHARED)}


@pytest.mark.parametrize("family", [pytest.param("gemma2", marks=pytest.mark.long), "gemma3"])
@pytest.mark.parametrize("sizes", [[90], [16] * 5 + [10], [1] * 90, [7, 16, 1, 16, 13, 1, 1, 16, 16, 3]], ids=str)
def test_declared_window_equals_torch(made: dict[str, Model], family: str, sizes: list[int]) -> None:
    """Compared with transformers on 90 tokens and windows of 12, for several ways to cut the text."""
    tokens, opened = models.tokens_of(90), made.get(family) or program(family, "float32")
    assert {layer.window for layer in opened.plan.model.layers} >= {12}
    expected = opened.logits(tokens)
    engine = opened.open(chunk_tokens=16)
    state, found, start = engine.start(engine.plan.storage), [], 0
    for size in sizes:
        for first in range(start, start + size, 16):
            piece = tokens[first : min(first + 16, start + size)]
            found.append(engine.forward([Chunk(state, piece, len(piece))])[0])
        start += size
    engine.close()
    assert apart(np.concatenate(found), expected) < 1e-4


def test_text_continues_beyond_rotary_tables(made: dict[str, Model]) -> None:
    """Slots of the cache are positions and start anew after evictions, so no position is the last one."""
    engine, policy = made["gemma3"].open(), KVEvictionPolicy.of(32, 4)
    assert engine.capabilities.max_position is None
    state = engine.start(engine.plan.storage)
    for token in models.tokens_of(4 * SLOTS):
        eviction = policy.eviction(state.length)
        if eviction is not None:
            state.evict(*eviction)
        logits = engine.forward([Chunk(state, [token], 1)])[0]
    assert state.position == 4 * SLOTS and state.length <= 32
    assert np.isfinite(logits).all() and np.abs(logits).max() > 0
    engine.close()


def test_integer_program_is_close_to_torch(made: dict[str, Model]) -> None:
    """They differ only where an activation is rounded the other way."""
    engine = made["qwen2"].open()
    found = engine_logits(engine, TOKENS)
    engine.close()
    decoder = decoder_of(made["qwen2"])
    with quiet_output(), torch.no_grad():
        expected = Append(decoder)(torch.tensor([TOKENS]), torch.tensor([0]), torch.arange(len(TOKENS))).numpy()
    floats = reference_logits(made["qwen2"].weights, TOKENS)
    assert apart(found, expected) < 0.03
    assert np.abs(found - expected).mean() < 0.5 * np.abs(found - floats).mean()
    assert 1e-3 < apart(found, floats) < 0.15


@pytest.mark.parametrize(
    ("family", "recipe"),
    [("qwen2", "s4-g32"), ("qwen2", "s8"), ("qwen3", "s4-g64"), ("gemma3", "s4-g32")],
    ids=["groups and biases", "rows and biases", "norms of heads", "windows and another curve"],
)
def test_integer_program_equals_sums_in_order_bitwise(made: dict[str, Model], family: str, recipe: str) -> None:
    built = made["qwen2"] if (family, recipe) == ("qwen2", "s4-g32") else program(family, recipe, layers=1)
    engine = built.open()
    found = engine_logits(engine, TOKENS)
    engine.close()
    assert np.array_equal(found, logits_in_order(built, TOKENS))


def test_step_and_append_share_weights_and_cache(made: dict[str, Model]) -> None:
    loaded = LoadedProgram(made["qwen2"].files / PROGRAM, threads=1)
    loaded.append(TOKENS[:9], 0, [8])
    by_append = loaded.append(TOKENS[9:10], 9, [0])[0]
    mask = np.full((1, SLOTS), UNSEEN, np.float32)
    mask[0, :10] = 0
    by_step = loaded.step(TOKENS[9:10], [9], [9], [0], mask)
    # on some processors attention adds in another order under a mask
    np.testing.assert_allclose(by_step, by_append, rtol=1e-6, atol=1e-6)
    weights = sum(made["qwen2"].weights.packed(module).nbytes for module in made["qwen2"].weights.modules())
    assert (made["qwen2"].files / PROGRAM).stat().st_size < 2.2 * weights + 150_000
    loaded.close()


def test_ring_with_sinks_through_step(made: dict[str, Model]) -> None:
    """As in a phone's app: 4 sinks and a window of 16 in 20 slots, with many more tokens than slots."""
    loaded = LoadedProgram(made["qwen2"].files / PROGRAM, threads=1)
    sinks, window, tokens = 4, 16, list(models.tokens_of(70))
    ring = []
    for position, token in enumerate(tokens):
        slot = position if position < sinks else sinks + (position - sinks) % window
        mask = np.full((1, SLOTS), UNSEEN, np.float32)
        mask[0, : min(position + 1, sinks + window)] = 0
        ring.append(loaded.step([token], [position], [slot], [0], mask)[0])
    straight = []
    for position, token in enumerate(tokens):
        mask = np.full((1, SLOTS), UNSEEN, np.float32)
        mask[0, : min(sinks, position + 1)] = 0
        mask[0, max(sinks, position + 1 - window) : position + 1] = 0
        straight.append(loaded.step([token], [position], [position], [0], mask)[0])
    assert apart(np.array(ring), np.array(straight)) < 0.03
    loaded.close()


def test_the_program_describes_itself(made: dict[str, Model]) -> None:
    loaded = LoadedProgram(made["gemma3"].files / PROGRAM, threads=1)
    for name, expected in description(made["gemma3"].plan).items():
        found = loaded.fact(name)
        assert (
            found == (expected if len(expected) != 1 else expected[0])
            if isinstance(expected, list)
            else (found == int(expected))
        ), name
    assert loaded.number("edgekit_window") == 12
    loaded.close()


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_the_vendors_method_gives_the_last_row(made: dict[str, Model], family: str) -> None:
    """Its cache is its own, so the whole text goes through it."""
    loaded = LoadedProgram(made[family].files / PROGRAM, threads=1)
    forward, start = loaded._method(FORWARD), 0
    for count in (5, 1, 16, 2, 1):
        tokens = TOKENS[start : start + count]
        found = forward.execute([torch.tensor([tokens]), torch.tensor([start])])[0].numpy()
        assert np.array_equal(found, loaded.append(tokens, start, [count - 1])[0]), start
        start += count
    loaded.close()


def test_planned_memory_is_read_from_the_file(made: dict[str, Model]) -> None:
    contents = read_contents(made["qwen2"].files / PROGRAM)
    assert {"forward", "append", "step", "get_eos_ids"} <= set(contents.methods)
    assert contents.delegates == {"XnnpackBackend"}
    assert "llama::custom_sdpa.out" in contents.operators
    cache = 2 * 2 * 2 * 16 * SLOTS * 4
    assert cache in contents.arenas["append"] and cache in contents.arenas["step"]


def test_more_logits_than_one_call_computes(made: dict[str, Model]) -> None:
    engine = made["gemma3"].open()
    engine._program.rows = 3
    state = engine.start(engine.plan.storage)
    found = engine.forward([Chunk(state, TOKENS[:16], 11)])[0]
    assert found.shape == (11, engine.capabilities.vocabulary) and state.length == 16
    assert apart(found, reference_logits(made["gemma3"].weights, TOKENS[:16])[5:]) < 1e-4
    engine.close()


def test_waiting_states_have_own_memory(made: dict[str, Model]) -> None:
    engine = made["qwen2"].open()
    states = [engine.start(engine.plan.storage) for _ in range(3)]
    for turn in range(3):
        for state in states:
            engine.forward([Chunk(state, TOKENS[:3], 0)])
            assert state.length == 3 * (turn + 1)
    waiting = [array for arrays in engine._swap._waiting.values() for array in arrays]
    assert sum(array.nbytes for array in waiting) == 2 * engine.state_bytes(engine.plan.storage)
    engine.close()


def test_a_longer_context_than_was_exported_is_refused(made: dict[str, Model]) -> None:
    plan = made["qwen2"].plan
    storage = plan.storage.model_copy(update={"capacity_tokens": SLOTS + 1})
    with pytest.raises(InvalidInput, match=f"holds {SLOTS} tokens .* export with that context"):
        made["qwen2"].open(storage=storage, cache=KVEvictionPolicy())


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (b"ET12", b"ET13", "file format 'ET13', this edgekit reads ET12; export it again"),
        (
            b"llama::custom_sdpa",
            b"llama::custom_sdpb",
            r"calls 'llama::custom_sdpb\.out', which ExecuTorch .* not have",
        ),
        (b"XnnpackBackend", b"VulkanBackend\0", "lowered to .*ulkan.*which this build .* export for xnnpack"),
    ],
    ids=["another format", "another version's operator", "another backend"],
)
def test_a_program_that_cannot_run_here_is_refused_with_the_cure(
    made: dict[str, Model], tmp_path: Path, old: bytes, new: bytes, line: str
) -> None:
    changed = made["qwen2"].copied(tmp_path)
    data = (changed.files / PROGRAM).read_bytes()
    (changed.files / PROGRAM).write_bytes(data.replace(old, new))
    with pytest.raises(EdgekitError, match=line):
        changed.open()


def test_a_program_of_another_layout_is_refused(made: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgekit_executorch.program.LAYOUT_VERSION", 99)
    with pytest.raises(Unsupported, match="layout 2, this edgekit runs 99; export it again"):
        made["qwen2"].open()


def test_coreml_takes_both_methods_whole() -> None:
    pytest.importorskip("coremltools", exc_type=ImportError)
    sizes = {}
    for recipe in ("float16", "s4-g32"):
        made = program("llama", recipe, layers=1, backend="coreml", kv_bits=16)
        contents = read_contents(made.files / PROGRAM)
        assert contents.delegates == {"CoreMLBackend"} and contents.operators == frozenset()
        assert set(contents.methods) == {"append", "step", *description(made.plan)}
        sizes[recipe] = contents.bytes
        with pytest.raises(Unsupported, match=r"lowered to coreml, which this build of ExecuTorch cannot run"):
            made.open()
    linears = 3 * 64 * 128 + 64 * (64 + 2 * 32 + 64)
    assert sizes["float16"] - sizes["s4-g32"] > linears  # 16 bits became 4 and scales, a row of 12 bits and less


def test_vulkan_takes_all_but_one_lookup() -> None:
    made = program("llama", "float32", layers=1, backend="vulkan")
    contents = read_contents(made.files / PROGRAM)
    assert contents.delegates == {"VulkanBackend"}
    assert len(contents.operators) <= 2, contents.operators
    with pytest.raises(Unsupported, match="lowered to vulkan"):
        made.open()
