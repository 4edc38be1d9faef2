"""Every block of Python and the first commands of every page run as written, and every option is on its page."""

from __future__ import annotations

import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny_encoders
import tiny_models
from click.testing import CliRunner
from fake_artifacts import install, make_artifact

from edgekit.cli import command
from edgekit.model import source
from edgekit.planner.request import PlanRequest
from edgekit.runtime.options import Options
from edgekit.testing import write_adapter

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "python.md").read_text()
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


FIRST = {
    page.stem: block[1].splitlines()
    for page in sorted(DOCS.rglob("*.md"))
    if (block := re.search(r"```(?:sh|bash|console)\n(.*?)```", page.read_text(), re.DOTALL))
}
NOT_RUN = {
    "needs a phone or a board": {"mobile", "lab"},
    "takes minutes or hours of an idle machine": {"measure", "measured"},
    "serves until it is stopped": {"server"},
    "installs; test_tutorial.py and tests/examples follow it": {"index", "tutorial", "write_a_target"},
    "compiles the native library": {"native"},
}
RUN = FIRST.keys() - set().union(*NOT_RUN.values())


def test_every_reason_belongs_to_a_page() -> None:
    assert len(RUN) == len(FIRST) - sum(map(len, NOT_RUN.values()))


@pytest.mark.slow
@pytest.mark.onnx
@pytest.mark.parametrize("page", sorted(RUN))
def test_the_first_commands_run_as_written(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec({"llamacpp": "xllamacpp", "apple": "mlx"}.get(page, "onnxruntime")) is None:  # importing one loads it
        pytest.skip("its target is not installed")
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(source, "_DEMO_FLOATS", tmp_path / "none")
    monkeypatch.chdir(tmp_path)
    for name in ("ARTIFACT", "DRAFT_ARTIFACT", "chat.onnx", "chat.llamacpp", "chat-new.onnx"):
        shutil.copytree(source.DEMO_ARTIFACT, name)
    Path("prompts.jsonl").write_text('{"prompt": "def add(a, b):", "max_tokens": 4}\n')
    Path("texts.txt").write_text("hello\n")
    if page == "embeddings":  # folders come before names on the hub
        tiny_encoders.write_bert(Path("sentence-transformers/all-MiniLM-L6-v2"))
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 8192}
    tiny_models.write_tiny(Path("Qwen/Qwen3-8B"), **sizes)
    write_adapter(Path("my-adapter"), source.open_source("demo").spec)
    for line in (line for line in FIRST[page] if not line.startswith("pip install")):
        program, *words = shlex.split(line.removeprefix("$ "), comments=True)
        done = CliRunner().invoke(command, words)
        assert (program, done.exit_code) == ("edgekit", 0), (line, done.output, done.exception)
