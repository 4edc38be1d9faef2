"""Adapters are loaded and dropped while requests run, and affect only the requests that name them."""

from __future__ import annotations

from pathlib import Path

import pytest
import runtimes

from edgekit.errors import DoesNotFit, InvalidInput, UnknownName
from edgekit.model.lora import WEIGHTS
from edgekit.runtime.memory.budget import MemoryBudget
from edgekit.testing import FakeEngine


def fake_adapter(place: Path, seed: int) -> Path:
    place.mkdir()
    (place / "adapter.json").write_text(f'{{"seed": {seed}}}')
    return place


PROMPT = [5, 6, 7, 8]


def test_unknown_adapter_is_refused(tmp_path: Path) -> None:
    with runtimes.make_runtime() as runtime:
        runtime.load_adapter("tone", fake_adapter(tmp_path / "tone", 1))
        with pytest.raises(UnknownName, match="tone"):
            runtime.complete(PROMPT, adapter="tune")
        with pytest.raises(InvalidInput, match="adapter name"):
            runtime.load_adapter("../tone", tmp_path / "tone")


def test_adapter_of_a_waiting_request_cannot_be_dropped(tmp_path: Path) -> None:
    with runtimes.make_runtime() as runtime:
        runtime.load_adapter("tone", fake_adapter(tmp_path / "tone", 1))
        stream = runtime.submit(PROMPT, max_tokens=4, ignore_eos=True, adapter="tone")
        with pytest.raises(InvalidInput, match="in use by 1"):
            runtime.drop_adapter("tone")
        stream.answer()
        runtime.drop_adapter("tone")
        assert runtime.adapters == {}
        with pytest.raises(UnknownName):
            runtime.drop_adapter("tone")


def test_adapters_are_counted_in_the_budget(tmp_path: Path) -> None:
    engine = FakeEngine(vocabulary=runtimes.codec().vocabulary)
    size = engine.load_adapter("probe", fake_adapter(tmp_path / "probe", 3))
    engine.drop_adapter("probe")
    budget = MemoryBudget(size + size // 2)
    with runtimes.make_runtime(engine, budget=budget) as runtime:
        runtime.load_adapter("one", fake_adapter(tmp_path / "one", 1))
        assert runtime.adapters == {"one": size} and budget.taken["adapters"] == size
        with pytest.raises(DoesNotFit, match="drop another adapter"):
            runtime.load_adapter("two", fake_adapter(tmp_path / "two", 2))
        runtime.drop_adapter("one")
        assert budget.taken["adapters"] == 0
        runtime.load_adapter("two", tmp_path / "two")


def test_an_adapter_without_room_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fake_adapter(tmp_path / "large", 1)
    (folder / WEIGHTS).write_bytes(bytes(4 << 20))
    budget = MemoryBudget(1 << 20)
    with runtimes.make_runtime(budget=budget) as runtime:
        monkeypatch.setattr(runtime.engine, "load_adapter", None)
        with pytest.raises(DoesNotFit, match="adapter 'large' needs 2 MiB and 1 MiB are free"):
            runtime.load_adapter("large", folder)
        assert not budget.taken.get("adapters") and runtime.adapters == {}


def test_dropping_an_adapter_drops_its_prefixes(tmp_path: Path) -> None:
    with runtimes.make_runtime(prefix_bytes=1 << 20) as runtime:
        runtime.load_adapter("tone", fake_adapter(tmp_path / "one", 1))
        first = runtime.complete(PROMPT * 3, max_tokens=6, ignore_eos=True, adapter="tone").tokens
        assert runtime.metrics().prefix_bytes > 0
        runtime.drop_adapter("tone")
        assert runtime.metrics().prefix_bytes == 0
        runtime.load_adapter("tone", fake_adapter(tmp_path / "two", 2))
        second = runtime.complete(PROMPT * 3, max_tokens=6, ignore_eos=True, adapter="tone").tokens
        assert first != second


def test_adapter_of_a_pinned_prompt_cannot_be_dropped(tmp_path: Path) -> None:
    with runtimes.make_runtime(prefix_bytes=1 << 20) as runtime:
        runtime.load_adapter("tone", fake_adapter(tmp_path / "one", 1))
        with runtime.pin(PROMPT * 3, adapter="tone"), pytest.raises(InvalidInput, match="pinned"):
            runtime.drop_adapter("tone")
        runtime.drop_adapter("tone")
