"""The first commands of every page run as written, with what a wheel has, or are listed here with the reason."""

from __future__ import annotations

import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgekit.cli import command
from edgekit.model import source
from edgekit.testing import write_adapter

DOCS = Path(__file__).parents[2] / "docs"
FIRST = {
    page.relative_to(DOCS).with_suffix("").as_posix(): block[1].replace("\\\n", " ").splitlines()
    for page in sorted(DOCS.rglob("*.md"))
    if (block := re.search(r"```(?:sh|bash|console)\n(.*?)```", page.read_text(), re.DOTALL))
}
NOT_RUN = {
    "apple": "packs for a Mac; tests/targets/mlx has its commands",
    "delivery": "needs releases of one's own; tests/apps/delivery has its commands",
    "embeddings": "needs the network",
    "handover": "needs the network",
    "index": "installs; test_tutorial.py follows the quickstart on the real model",
    "lab": "compiles a runner for executorch",
    "measure": "takes minutes; tests/apps/bench has its commands",
    "measured": "takes hours on an idle machine",
    "mobile": "needs executorch; tests/targets/executorch has its commands",
    "native": "compiles the native library; tests/apps/native has its commands",
    "server": "serves until it is stopped; tests/apps/serve has its commands",
    "tutorial": "installs; test_tutorial.py follows it on the real model",
    "write_a_target": "installs; tests/examples follows it",
}
NEEDS = {"llamacpp": "xllamacpp"}


def test_every_reason_belongs_to_a_page() -> None:
    assert not NOT_RUN.keys() - FIRST.keys()


@pytest.mark.slow
@pytest.mark.onnx
@pytest.mark.parametrize("page", FIRST.keys() - NOT_RUN.keys())
def test_the_first_commands_run_as_written(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec(NEEDS.get(page, "onnxruntime")) is None:  # importing xllamacpp loads another llama.cpp
        pytest.skip("its target is not installed")
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(source, "_DEMO_FLOATS", tmp_path / "none")
    monkeypatch.chdir(tmp_path)
    for name in ("ARTIFACT", "DRAFT_ARTIFACT"):
        shutil.copytree(source.DEMO_ARTIFACT, name)
    Path("prompts.jsonl").write_text('{"prompt": "def add(a, b):", "max_tokens": 4}\n')
    write_adapter(Path("my-adapter"), source.open_source("demo").spec, rank=4)
    ran = 0
    for line in FIRST[page]:
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words[:2] == ["pip", "install"]:
            continue
        assert words[0] == "edgekit", line
        done = CliRunner().invoke(command, words[1:])
        assert done.exit_code == 0, (line, done.output, done.exception)
        ran += 1
    assert ran
