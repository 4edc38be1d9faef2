"""Calls that would abort the process in llama.cpp raise typed errors before."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import family_models as models
from edgekit_llamacpp import layout, library
from edgekit_llamacpp.engine import LlamaCppEngine
from edgekit_llamacpp.layout import WEIGHTS, check_file
from engines import llamacpp_model

from edgekit.contracts.engine import Chunk
from edgekit.contracts.feeding import feed
from edgekit.contracts.manifest import MANIFEST
from edgekit.contracts.plan import Plan
from edgekit.errors import ContextExceeded, DamagedArtifact, InvalidInput, TargetFailed, Unsupported

pytestmark = [pytest.mark.llamacpp, pytest.mark.quantize]
runs = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))


def flip_number(name: bytes, data: bytearray) -> None:
    data[data.index(name) + len(name) + 4] ^= 1


def opened(family: str = "llama", *, exact: bool = False, **plan: Any) -> LlamaCppEngine:
    made = llamacpp_model(family, **plan)
    return LlamaCppEngine(made.plan, made.files, exact=exact)


@runs
@pytest.mark.parametrize("exact", [False, True])
def test_full_cache_of_every_sequence_is_an_error(exact: bool) -> None:
    engine = opened(exact=exact, context=256, sequences=3)
    states = [engine.start(engine.plan.storage) for _ in range(3)]
    for state in states:
        feed(engine, state, [5] * 255, 0)
    answers = engine.forward([Chunk(state, [7], 1) for state in states])
    assert all(np.isfinite(rows).all() for rows in answers)
    with pytest.raises(ContextExceeded):
        engine.forward([Chunk(states[0], [7], 1)])
    states[1].rewind(100)
    assert engine.forward([Chunk(states[1], [7] * 50, 1)])[0].shape == (1, 160)
    engine.close()


@runs
def test_the_library_ends_a_call_when_the_stop_flag_is_set() -> None:
    engine = opened(sequences=2)
    states = [engine.start(engine.plan.storage) for _ in range(2)]
    feed(engine, states[0], [5] * 8, 0)
    engine._stop.set()  # not `interrupt`, after which no call reaches the library
    with pytest.raises(TargetFailed, match=r"a call of 8 tokens failed \(2\)"):
        engine.forward([Chunk(states[1], [5] * 8, 1)])
    engine.close()


def told_threads(engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Collect the numbers of threads that llama.cpp is told."""
    told: list[tuple[int, ...]] = []
    change = engine._library.llama_set_n_threads
    monkeypatch.setattr(
        engine._library, "llama_set_n_threads", lambda context, *counts: told.append(counts) or change(context, *counts)
    )
    return told


@runs
def test_threads_change_in_every_context(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(threads=2, sequences=1)
    told = told_threads(engine, monkeypatch)
    storage = engine.plan.storage
    state = engine.start(storage)
    engine.use_threads(1)
    feed(engine, state, [5] * 40, 1)
    assert told == [(1, 1)] and engine.capabilities.threads == 2
    state.close()
    other = engine.start(storage.model_copy(update={"kv_bits": 32}))
    assert [context.shape.threads for context in engine._contexts.values()] == [1]
    other.close()
    engine.close()
    exact = opened(threads=2, exact=True)
    with pytest.raises(Unsupported, match="fixed when an artifact is opened"):
        exact.use_threads(1)
    exact.close()


@runs
def test_steps_leave_a_busy_core_alone_and_prefill_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(threads=2)
    told = told_threads(engine, monkeypatch)
    state, now = engine.start(engine.plan.storage), [0.0]

    def clock() -> float:
        """With two threads, a call takes a hundred times as long as with one."""
        now[0] += 1.0 if not told or told[-1] == (2, 2) else 0.01
        return now[0]

    monkeypatch.setattr("edgekit_llamacpp.engine.time.perf_counter", clock)
    for _ in range(20):
        feed(engine, state, [5], 1)
    assert told == [(1, 1)]
    feed(engine, state, [5] * 40, 1)
    assert told[1:] == [(2, 2), (1, 1)]  # 39 tokens in one call, and the last, whose logits are returned, alone
    engine.close()


@runs
def test_256_sequences_run_and_the_next_is_refused() -> None:
    engine = opened(models.ONE_LAYER, context=64, sequences=256, chunk_tokens=16)
    states = [engine.start(engine.plan.storage) for _ in range(256)]
    with pytest.raises(InvalidInput, match="all 256 states"):
        engine.start(engine.plan.storage)
    one = engine.forward([Chunk(states[0], [9], 1)])[0]
    many = engine.forward([Chunk(state, [9], 1) for state in states[1:]])
    assert len(many) == 255 and all(np.abs(rows - one).max() < 0.1 * np.abs(one).max() for rows in many)
    engine.close()


@runs
def test_more_rows_than_reserved_come_in_several_calls() -> None:
    for exact in (False, True):
        engine = opened(exact=exact)
        tokens = list(models.tokens_of(64))
        whole = engine.forward([Chunk(engine.start(engine.plan.storage), tokens, 64)])[0]
        state, pieces = engine.start(engine.plan.storage), []
        for token in tokens:
            pieces.append(engine.forward([Chunk(state, [token], 1)])[0])
        assert whole.shape == (64, 160)
        assert np.array_equal(whole, np.concatenate(pieces)) or not exact
        assert np.abs(whole - np.concatenate(pieces)).max() < 0.1 * np.abs(whole).max()
        engine.close()


@runs
@pytest.mark.parametrize(
    "change",
    [
        "cut", "foreign", "empty", "missing", "other tensors", "magic", "embedding_length", "attention.head_count_kv",
        "rope.dimension_count",
    ],
)  # fmt: skip
def test_damaged_or_foreign_file_is_refused(change: str, tmp_path: Path) -> None:
    made = llamacpp_model("llama")
    data = bytearray((made.files / WEIGHTS).read_bytes())
    if change == "cut":
        data = data[:-100]
    elif change == "foreign":
        data = bytearray((llamacpp_model("qwen2").files / WEIGHTS).read_bytes())
    elif change == "empty":
        data = bytearray()
    elif change == "other tensors":
        data = bytearray((llamacpp_model("llama", "s8").files / WEIGHTS).read_bytes())
    elif change == "magic":
        data[:4] = b"GGML"
    elif change != "missing":
        flip_number(f"llama.{change}".encode(), data)
    if change != "missing":
        (tmp_path / WEIGHTS).write_bytes(data)
    with pytest.raises(DamagedArtifact, match="export the artifact again"):
        LlamaCppEngine(made.plan, tmp_path)


@runs
def test_a_sealed_file_is_checked_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    made, files, checked = llamacpp_model("llama"), tmp_path / "artifact", []
    shutil.copytree(made.files, files)
    (files / MANIFEST).write_bytes(b"its hash names the artifact")

    def check(plan: Plan, path: Path) -> bool:
        checked.append(path)
        return check_file(plan, path)

    monkeypatch.setattr(layout, "check_file", check)
    first = LlamaCppEngine(made.plan, files)
    second = LlamaCppEngine(made.plan, files)
    assert len(checked) == 1 and first.notes == second.notes
    other = made.plan.model_copy(update={"context": made.plan.context // 2})
    LlamaCppEngine(other, files).close()
    assert len(checked) == 2, "another plan is not the one that was checked"
    data = (files / WEIGHTS).read_bytes()
    (files / WEIGHTS).write_bytes(data.replace(b"llama.embedding_length", b"llama.embedding_lengtX"))
    with pytest.raises(DamagedArtifact):
        LlamaCppEngine(made.plan, files)
    for engine in (first, second):
        engine.close()


@runs
def test_yarn_model_refuses_to_evict_and_windows_refuse_to_save() -> None:
    """Which the suite of engines tries."""
    yarn, windows = opened("llama with yarn"), opened("gemma3")
    assert not yarn.capabilities.can_evict and not windows.capabilities.can_save
    yarn.close()
    windows.close()


@runs
def test_unknown_form_of_saved_state_is_an_error() -> None:
    from edgekit_llamacpp.kv_blob import KVLayout, decode

    with pytest.raises(TargetFailed, match="not supported"):
        decode(np.frombuffer(b"\x01" * 64, np.uint8), KVLayout((32,), 16, transposed=False), 3)


@runs
def test_exact_mode_refuses_narrow_cache() -> None:
    with pytest.raises(Unsupported, match="kv_bits 16"):
        opened(models.WIDE_HEADS, kv_bits=8, exact=True)
