"""The Python of docs/memory.md runs, and the scripts behind its figures count correctly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import runtimes
from fake_artifacts import install, make_artifact

from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.testing import FakeEngine
from examples.benchmarks import endless, memory_contract

ROOT = Path(__file__).parents[2]


def test_the_block_on_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path / "site", monkeypatch)
    make_artifact(tmp_path / "demo.edgekit", context=4096)
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/memory.md").read_text(), re.DOTALL)
    exec(compile(block, "docs/memory.md", "exec"), {})
    assert capsys.readouterr().out.startswith("True")


def test_memory_contract_summary_counts_violations() -> None:
    def row(**known: object) -> dict[str, object]:
        sizes = {"hidden": 64, "inner": 128, "layers": 2, "vocabulary": 300}
        return {**sizes, "error": 0.0, "killed": False, "predicted_mapped": 9 << 20, "mapped": 9 << 20,
                "predicted": 1000,
                "peak": 1000, "opened": 500, "running": 1000, "predicted_running": 1000, "artifact": "a",
                "by_class": {"cache": (3 << 20, 2 << 20), "adapters": (7 << 20, 7 << 20)}, **known}  # fmt: skip

    rows = [
        row(),
        row(error=0.08, predicted_mapped=99 << 17, hidden=32),
        row(error=-0.02, peak=1060, running=1060),
        row(killed=True, error=9.0),
    ]
    found = memory_contract.summary(rows)
    assert (found["opening_above"], found["running_above"]) == (pytest.approx(-0.5), pytest.approx(0.06))
    assert memory_contract.class_table(rows)[2:] == [
        "| cache | 3.0, 2.0 (+50.0%) |", "| adapters | 7.0 counted |", "| mapped weights | 9.0, 9.0 (+0.0%) |"
    ]  # fmt: skip
    assert (found["configurations"], found["models"], found["killed"], found["above_cap"]) == (4, 2, 1, 1)
    assert (found["median_error"], found["worst_over"], found["worst_under"]) == (0.02, 0.08, -0.02)
    assert (found["mapped_median_error"], found["mapped_worst_over"]) == (0.0, pytest.approx(0.375))


def test_perplexities_compare_a_window_with_recomputing_it() -> None:
    # With one layer, a state without its oldest tokens equals one that never processed them.
    engine = FakeEngine(vocabulary=runtimes.codec("byte-level BPE").vocabulary, layers=1)
    policy = KVEvictionPolicy.of(64, 4)
    with runtimes.make_runtime(engine, window=64, sinks=4) as runtime:
        found = endless.perplexities(runtime, [7 + place % 90 for place in range(400)], policy)
    assert found["no_sinks_over_recomputed"] == pytest.approx(1.0)
    assert found["scored_tokens"] > 200 and found["sinks_over_recomputed"] != pytest.approx(1.0)
