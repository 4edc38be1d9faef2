"""The commands and the Python of the README run as they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the working directory after the README's commands."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("reader")
    for block in blocks(README, "console"):
        for line in block.splitlines():
            if line.startswith("$ edgekit "):
                done = edgekit(folder, *shlex.split(line.removeprefix("$ edgekit ")))
                assert done.returncode == 0, done.stderr
    return folder


def edgekit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "edgekit", *arguments], cwd=folder, capture_output=True, text=True, timeout=300
    )


def test_the_commands_of_the_readme_make_an_artifact(folder: Path) -> None:
    assert (folder / "demo.edgekit/manifest.json").is_file()


def test_the_plan_in_the_readme_is_the_plan_that_is_printed(folder: Path) -> None:
    shown = next(block for block in blocks(README, "console") if "$ edgekit plan" in block)
    printed = edgekit(folder, "plan", "demo", "--device", "raspberry-pi-5-8gb", "--recipe", "s4-g64").stdout
    lines = [line for line in shown.splitlines() if line.startswith(("raspberry", "  memory", "  allowed"))]
    assert len(lines) == 3
    for line in lines:
        assert line in printed


@pytest.mark.parametrize("block", blocks(README, "python"), ids=["readme"])
def test_the_python_of_the_readme_runs(folder: Path, block: str) -> None:
    done = subprocess.run([sys.executable, "-c", block], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
