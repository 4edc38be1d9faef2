"""The Python of docs/memory.md runs, and figures on pages equal the stored results."""

from __future__ import annotations

import importlib
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import runtimes
from fake_artifacts import install, make_artifact

from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.runtime.generation.tokenizer import read_codec
from edgekit.runtime.runtime import Runtime
from edgekit.testing import FakeEngine
from edgekit.testing.drafting import Drafting, ReplayDrafter
from examples.benchmarks import endless, measured_page, memory_contract

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


MEASURED = " ".join((measured_page.ROOT / "docs/measured.md").read_text().split())


README = " ".join((measured_page.ROOT / "README.md").read_text().split())


@pytest.mark.parametrize("page", measured_page.PAGES, ids=lambda path: path.stem)
def test_a_page_has_the_tables_of_the_stored_results(page: Path) -> None:
    text = page.read_text()
    assert text == measured_page.written(text), "run: python -m examples.benchmarks.measured_page"


def test_every_table_stands_on_one_page() -> None:
    pages = "".join(path.read_text() for path in measured_page.PAGES)
    assert {name: pages.count(f"<!-- {name} -->") for name in measured_page.TABLES} == dict.fromkeys(
        measured_page.TABLES, 1
    )


def test_sentences_about_speed_are_those_of_the_results() -> None:
    spinning = measured_page.peers()[measured_page.SPINNING]["decode_tokens_per_s"]
    assert f"{spinning:.1f} tokens/s" in MEASURED and f"{spinning:.1f} tokens/s" in README
    assert f"{spinning / measured_page.best_llama_cpp('decode_tokens_per_s'):.2f} times as fast" in MEASURED
    onnx, llama_cpp = shares_beside_a_busy_process("onnx brief"), shares_beside_a_busy_process("llamacpp brief")
    assert f"onnx decodes at {min(onnx):.2f} to {max(onnx):.2f} of its speed" in MEASURED
    assert f"llama.cpp at {min(llama_cpp):.2f} to {max(llama_cpp):.2f}" in MEASURED


def shares_beside_a_busy_process(engine: str) -> list[float]:
    shares = []
    for name in measured_page.PROCESSORS:
        for phases in measured_page.stored(f"engine_turns_{name}.json").values():
            if isinstance(phases, dict) and "beside_one_busy_process" in phases:
                shares += [
                    decoded(phases, "beside_one_busy_process", engine, prompt)
                    / decoded(phases, "quiet", engine, prompt)
                    for prompt in phases["quiet"][engine]
                ]
    return shares


def decoded(phases: dict[str, Any], phase: str, engine: str, prompt: str) -> float:
    speed: float = phases[phase][engine][prompt]["decode_tokens_per_s"]
    return speed


def test_sentences_about_memory_are_those_of_the_results() -> None:
    found = measured_page.stored("memory.json")
    random = found["random models"]
    assert f"{random['configurations']} openings of {random['models']} random models" in MEASURED
    assert f"median error was {random['median_error']:.1%}".replace("%", " %") in MEASURED
    assert (
        f"{random['worst_over'] * 100:.1f} % too high and the lowest {-random['worst_under'] * 100:.1f} %" in MEASURED
    )
    assert random["above_cap"] == random["killed"] == 0
    assert f"{max(each['worst_over'] for each in found.values()) * 100:.1f} % too much was predicted" in MEASURED


def test_sentences_about_quality_are_those_of_the_results() -> None:
    found = {loss.what: loss for loss in measured_page.losses("smollm2")}
    onnx, gguf, rival = (
        found[what] for what in ("edgekit, default, onnx", "edgekit, default, llamacpp", "llama.cpp Q4_K_M")
    )
    assert f"{onnx.file_bytes / rival.file_bytes - 1:.0%} larger".replace("%", " %") in MEASURED
    assert f"as GGUF it is {gguf.file_bytes / rival.file_bytes - 1:.0%} larger".replace("%", " %") in MEASURED
    assert f"loses {1 - onnx.kl[0] / rival.kl[0]:.0%} less on code".replace("%", " %") in MEASURED
