"""The commands and the Python of the README run as they stand, with a local file in place of the hub's model."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from edgekit.testing.real_models import RealModelMissing, smollm2

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

pytestmark = [pytest.mark.onnx, pytest.mark.quantize, pytest.mark.real, pytest.mark.slow]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Type the README's commands; return what each printed. Without calibration, which takes minutes."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("torch")
    try:
        model = str(smollm2())
    except RealModelMissing as missing:
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("reader")
    outputs = {"folder": str(folder)}
    for block in blocks(README, "console"):
        for line in block.splitlines():
            if line.startswith("$ edgekit "):
                words = shlex.split(line.removeprefix("$ edgekit ").replace(HUB_ID, model))
                quick = ["--effort", "quick"] if words[0] == "export" else []
                outputs[line] = python(folder, "-m", "edgekit", *words, *quick)
    return outputs


def python(folder: str | Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_commands_of_the_readme_make_an_artifact(printed: dict[str, str]) -> None:
    assert [line.split()[2] for line in printed if line.startswith("$")] == ["run", "plan", "export", "run"]
    assert (Path(printed["folder"]) / "smollm2.edgekit/manifest.json").is_file()


def test_the_plan_in_the_readme_is_the_plan_that_is_printed(printed: dict[str, str]) -> None:
    command = next(line for line in printed if line.startswith("$ edgekit plan"))
    lines = [line for line in README.splitlines() if line.startswith(("raspberry", "  memory", "  allowed"))]
    assert len(lines) == 3
    for line in lines:
        assert line in printed[command].replace("SmolLM2-135M-Instruct.Q4_1", "SmolLM2-135M-Instruct")


@pytest.mark.parametrize("block", blocks(README, "python"), ids=["readme"])
def test_the_python_of_the_readme_runs(printed: dict[str, str], block: str) -> None:
    assert python(printed["folder"], "-c", block).strip()
