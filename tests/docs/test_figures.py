"""The Python of docs/memory.md runs, and figures on pages equal the stored results."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from fake_artifacts import install, make_artifact

from examples.benchmarks import measured_page

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
    newest, *_, older = measured_page.speeds()
    assert f"{spinning / older.best('llama.cpp', 'decode_tokens_per_s'):.2f} times as fast" in MEASURED
    theirs, ours = (newest.best(name, "prefill_tokens_per_s") for name in ("OpenVINO GenAI", "edgekit"))
    assert all(f"512 tokens {ours / theirs:.2f} times as fast as OpenVINO" in page for page in (MEASURED, README))
    earlier = measured_page.stored("engine_turns_operators.json")["earlier"]["OpenVINO GenAI"]["512"]
    assert f"{earlier['prefill_tokens_per_s']:,.0f} tokens/s" in MEASURED
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
    low, high = min(each["worst_under"] for each in found.values()), max(each["worst_over"] for each in found.values())
    assert f"{high * 100:.1f} % too much was predicted, and {-low * 100:.1f} % too little" in MEASURED
    memory, running = (ROOT / "docs/memory.md").read_text(), found["demo"]["running_above"]
    assert f"at most {-low * 100:.1f} % above" in memory and f"at most {running * 100:.1f} % more was taken" in memory


def test_sentences_about_quality_are_those_of_the_results() -> None:
    rows = {(row["model"], row["recipe"]): row for row in measured_page.stored("quality.json")["rows"]}
    shares = []
    for peer in ("IQ4_KS", "IQ4_K", "Q4_K_M"):
        ours, theirs = rows["demo", f"balanced at the bytes of {peer}"], rows["demo", peer]
        assert ours["bytes"] <= theirs["bytes"]
        losses = {kind: [fmean(row["text"][kind]["kl"]) for row in (ours, theirs)] for kind in measured_page.KINDS}
        assert "{0:.4f}, as {2} {1:.4f}".format(*losses["code"], peer) in MEASURED
        shares += [one / other for one, other in losses.values()]
    assert f"lose {min(shares):.1f} to {max(shares):.1f} of what 4-bit formats lose" in MEASURED
    found = {loss.what: loss for loss in measured_page.losses("smollm2")}
    sizes = {
        target: measured_page.real_models()["smollm2", target, "balanced, calibrated"]["bytes"]
        for target in ("onnx", "llamacpp")
    }
    assert f"{sizes['llamacpp'] / sizes['onnx'] - 1:.0%} larger than for onnx".replace("%", " %") in MEASURED
    kept, balanced, peer = (
        found[what] for what in ("edgekit, default, onnx", "edgekit, balanced, llamacpp", "llama.cpp Q4_K_M")
    )
    assert max(kept.kl) == 0 and "its default loses nothing" in MEASURED
    times = [one / other for one, other in zip(balanced.kl, peer.kl, strict=True)]
    assert f"{min(times):.1f} to {max(times):.1f} times as much as Q4_K_M" in MEASURED
