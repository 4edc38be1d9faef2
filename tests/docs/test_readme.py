"""The README is short, in its order, its commands run, and its picture shows what `plan` prints."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import readme_picture

from examples.small_models import RealModelMissing, smollm2

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]


def model() -> str:
    try:
        return str(smollm2())
    except RealModelMissing as missing:
        pytest.skip(str(missing))


def test_the_readme_is_short_and_in_its_order() -> None:
    assert len(README.splitlines()) <= 80
    parts = [
        "![",
        "<!-- rivals -->",
        "make demo",
        "make test",
        "pip install",
        "\nedgekit run",
        "| target |",
        "## Read on",
    ]
    places = [README.index(part) for part in parts]
    assert places == sorted(places)


def test_what_the_readme_installs_and_makes_is_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [name for names in re.findall(r"edgekit\[([\w,]+)\]", README) for name in names.split(",")]
    assert set(named) <= set(extras)
    targets = [command.split()[1] for command in COMMANDS if command.startswith("make ")]
    makefile = (ROOT / "Makefile").read_text()
    assert targets == ["demo", "test"] and all(f"\n{target}:" in makefile for target in targets)
    assert len(COMMANDS) == 4


@pytest.mark.onnx
@pytest.mark.quantize
@pytest.mark.real
@pytest.mark.slow
def test_the_command_of_the_readme_answers() -> None:
    for name in ("onnxruntime", "torch"):
        pytest.importorskip(name)
    (command,) = [each for each in COMMANDS if each.startswith("edgekit run")]
    words = shlex.split(command.replace(readme_picture.HUB_ID, model()))[1:]
    done = subprocess.run([sys.executable, "-m", "edgekit", *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and len(done.stdout.split()) > 5, done.stderr


@pytest.mark.real
@pytest.mark.parametrize("command", [each for each in readme_picture.COMMANDS if " plan " in each])
def test_the_picture_shows_what_plan_prints(command: str) -> None:
    lines = readme_picture.shown(command, model())
    drawn = readme_picture.PICTURE.read_text()
    missing = [line for line in lines if line != "…" and f">{readme_picture.escape(line)}</text>" not in drawn]
    assert missing == [], "run: python -m docs.readme_picture"
