"""The commands and the app of the tutorial and the quickstart run, on the demo model and on a real one."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.small_models import SMOLLM2, RealModelMissing, real_model

DOCS = Path(__file__).parents[2] / "docs"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]


def commands_of(page: str) -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def follow(page: str, folder: Path, model: str) -> dict[str, str]:
    """Type every command of a page in `folder`; return what each printed."""
    for name in ("onnxruntime", "torch", "llguidance"):
        pytest.importorskip(name)
    printed = {}
    for command in commands_of(page):
        words = shlex.split(command.replace(HUB_ID, model))
        program = ["-m", "edgekit"] if words[0] == "edgekit" else []
        done = subprocess.run(
            [sys.executable, *program, *words[1:]], cwd=folder, capture_output=True, text=True, timeout=1500
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        printed[command] = done.stdout
    return printed


def write_app(page: str, folder: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (folder / "app.py").write_text(block)


def run(cells: list[dict[str, Any]], folder: Path, changed: Callable[[str], str]) -> str:
    """Run the code cells in order in `folder`, `changed` applied to each; return what they printed.

    `%%writefile` and `!` do as in Jupyter; `%pip` is left out, since what it installs is here.
    """
    printed = ""
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        text = changed("".join(cell["source"]))
        if text.startswith("%%writefile "):
            name, _, body = text.removeprefix("%%writefile ").partition("\n")
            (folder / name).write_text(body)
            continue
        for line in text.splitlines():
            if line.startswith("%pip "):
                continue
            assert line.startswith("!"), line
            command = re.sub(r"^(edgekit|python)\b", lambda word: PROGRAMS[word[0]], line.removeprefix("!"))
            done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=1500)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            printed += done.stdout
    return printed


PROGRAMS = {"edgekit": f"{sys.executable} -m edgekit", "python": sys.executable}


@pytest.mark.slow
@pytest.mark.long
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Run every code cell in order, with the demo model instead of the downloaded one."""
    for name in ("onnxruntime", "torch", "llguidance"):
        pytest.importorskip(name)
    cells = json.loads((DOCS / "tutorial.ipynb").read_text())["cells"]
    printed = run(cells, tmp_path, lambda text: text.replace(HUB_ID, "demo-draft"))
    assert "fits" in printed and re.search(r"title='.*' kind='(idea|task|reminder)'", printed)


@pytest.mark.real
@pytest.mark.long
def test_the_tutorial_on_the_real_model(tmp_path: Path) -> None:
    try:
        model = real_model(SMOLLM2)
    except RealModelMissing as missing:
        pytest.skip(str(missing))
    page = (DOCS / "tutorial.md").read_text()
    write_app(page, tmp_path)
    printed = follow(page, tmp_path, str(model))
    answer = next(text for command, text in printed.items() if command.startswith("edgekit run"))
    assert "sky" in answer or "light" in answer
    assert "kind=" in printed["python app.py notes.edgekit"]


def test_the_quickstart(tmp_path: Path) -> None:
    page = (DOCS / "index.md").read_text()
    assert len(follow(page, tmp_path, "demo")) == 3
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
