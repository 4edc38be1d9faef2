"""The pictures of docs/memory.md are those that the code draws, and its figures those that were stored."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from fake_artifacts import install, make_artifact

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import window_picture as drawn  # noqa: E402


def test_the_pictures_are_what_the_code_does() -> None:
    assert (ROOT / "docs/window.svg").read_text() == drawn.window_picture()
    assert (ROOT / "docs/ladder.svg").read_text() == drawn.ladder_picture()


def test_the_block_on_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path / "site", monkeypatch)
    make_artifact(tmp_path / "demo.edgekit", context=4096)
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/memory.md").read_text(), re.DOTALL)
    exec(compile(block, "docs/memory.md", "exec"), {})
    assert capsys.readouterr().out.startswith("True")


def test_the_contract_held_where_it_was_measured() -> None:
    found = json.loads((ROOT / "docs/data/memory_contract.json").read_text())
    assert found["killed"] == 0 and found["cap"] == 1.05
    assert found["configurations"] >= 200 and found["above_cap"] == 0
    assert found["mapped_median_error"] <= 0.05
    assert found["median_error"] <= 0.05 and found["worst_over"] <= 0.10 and found["worst_under"] >= -0.03


def test_endless_generation_stayed_flat() -> None:
    found = json.loads((ROOT / "docs/data/endless.json").read_text())
    assert found["answer"]["tokens"] >= 1_000_000 and len(found["answer"]["kv_bytes_seen"]) == 1
    assert found["answer"]["resident_slope_bytes_per_100k"] < 1 << 20
    assert found["answer"]["last_over_first"] <= 1.05 and found["answer"]["last_over_young"] <= 1.05
    assert found["perplexity"]["sinks_over_recomputed"] <= 1.02
