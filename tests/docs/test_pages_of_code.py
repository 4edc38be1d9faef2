"""Every block of the Python and runtime pages runs, in order, and every option is on them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fake_artifacts import install, make_artifact

from edgekit.planner.request import PlanRequest
from edgekit.runtime.options import Options

PAGE = (Path(__file__).parents[2] / "docs/python.md").read_text()


BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.onnx
@pytest.mark.quantize
def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("torch")
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "docs/python.md", "exec"), names)
    shown = capsys.readouterr().out
    for part in ("onnx cpu balanced", "100% self-check", "does not fit raspberry-pi-5-8gb", "s4-g32 ",
                 "unknown option 'contxt'; did you mean context?", "context 3: must be at least 16"):  # fmt: skip
        assert part in shown


def test_every_option_of_a_plan_is_on_the_page() -> None:
    assert [name for name in PlanRequest.model_fields if f"`{name}`" not in PAGE] == []


DOCS = Path(__file__).parents[2] / "docs"


PAGES = {name: (DOCS / name).read_text() for name in ("runtime.md", "chat.md", "serving.md", "evaluation.md")}


@pytest.mark.parametrize("name", PAGES)
def test_every_block_runs_runtime_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance")
    install(tmp_path / "site", monkeypatch)
    make_artifact(tmp_path / "my-artifact")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGES[name], re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, f"docs/{name}", "exec"), names)
    shown = capsys.readouterr().out
    for expected in re.findall(r"print\(.*\)  # (.*: .*)$", PAGES[name], re.MULTILINE):
        assert expected in shown


def test_every_option_is_on_the_page() -> None:
    assert [name for name in Options.__annotations__ if f"`{name}`" not in "".join(PAGES.values())] == []
