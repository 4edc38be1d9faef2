"""The script behind the figures of docs/speculation.md measures what it says."""

from __future__ import annotations

import importlib
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.runtime.generation.tokenizer import read_codec
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.speculation.drafters import Drafting
from edgekit.testing.drafting import ReplayDrafter

ROOT = Path(__file__).parents[2]


def example(name: str) -> Any:
    return importlib.import_module(f"examples.benchmarks.{name}")


def figures(mode: str, *, equal: int = 10, proposed: int = 5, margins: tuple[float, ...] = ()) -> dict[str, Any]:
    return {
        f"ngram, greedy, {mode}": {"equal": equal, "of": 10, "proposed": proposed, "margins": margins},
        "noise": 0.1,
    }


@pytest.mark.parametrize(
    ("found", "is_refused"),
    [
        (figures("exact"), False),
        (figures("default", equal=9, margins=(0.05,)), False),
        (figures("exact", equal=9, margins=(0.05,)), True),
        (figures("any", equal=9), True),
        (figures("exact", proposed=0), True),
        (figures("default", equal=9, margins=(0.2,)), True),
    ],
)
def test_the_script_stores_no_figures_of_drafting_that_changed_a_text(found: dict[str, Any], is_refused: bool) -> None:
    refused = pytest.raises(AssertionError, match="onnx: ngram") if is_refused else nullcontext()
    with refused:
        example("speculation_figures").refuse_changed_texts("onnx", found)


def test_zero_time_engine_runs_in_the_loop() -> None:
    figures = example("speculation_figures")
    storage = KVCacheConfig(capacity_tokens=128, kv_bits=16)
    drafting = Drafting(lambda prompt: ReplayDrafter([7] * 200), 4)
    codec = read_codec(ROOT / "examples/training/demo/target")
    with Runtime(figures.Nothing(), codec, kv_config=storage, policy=KVEvictionPolicy(), drafting=drafting) as runtime:
        assert runtime.complete([1] * 3, max_tokens=50).tokens == (7,) * 50
        assert runtime.metrics().steps < 15


def test_figures_are_stored_with_the_load_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, out = example("speculation_figures"), tmp_path / "figures.json"
    out.write_text('{"host": 1}')
    monkeypatch.setitem(script.PARTS, "lookup", lambda asked: {"by_length": {}})
    monkeypatch.setattr("sys.argv", ["speculation_figures", "lookup", "--out", str(out)])
    script.main()
    stored = json.loads(out.read_text())
    assert stored["host"] == 1 and len(stored["lookup"]["load"]) == 2
