"""`optimum-cli export edgekit`: the same options, for people who look there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

pytest.importorskip("optimum.commands.optimum_cli")
pytest.importorskip("onnxruntime")

from edgekit.artifact.artifact import verify
from edgekit.cli.export import command

pytestmark = [pytest.mark.quantize, pytest.mark.onnx]


def optimum(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from optimum.commands.optimum_cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)


def test_optimum_lists_our_export_with_all_its_options() -> None:
    shown = optimum("export", "edgekit", "--help").stdout
    for option in command.params:
        if isinstance(option, click.Option):
            assert max(option.opts, key=len) in shown


def test_optimum_makes_the_same_artifact_as_edgekit_export(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = optimum(
        *("export", "edgekit", "--model", "demo-draft", "--effort", "quick", "--device", "raspberry-pi-5-8gb"),
        *("--target", "onnx", "--recipe", "s4-g64", "--context", "256", "-o", str(out)),
    )
    assert done.returncode == 0, done.stderr
    plan = verify(out).plan
    assert (plan.device, plan.recipe.name, plan.context) == ("raspberry-pi-5-8gb", "s4-g64", 256)


def test_optimum_command_reports_our_errors(tmp_path: Path) -> None:
    done = optimum("export", "edgekit", "--model", "nowhere", "-o", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr
