"""`edgekit export`: checks come before the work, and a device that cannot be built does not stop the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from edgekit_executorch import ExecutorchTarget

import edgekit
from edgekit.api import build_one
from edgekit.artifact.artifact import Artifact, read_manifest
from edgekit.cli import command
from edgekit.cli._progress import time_left
from edgekit.contracts.plan import Plan
from edgekit.errors import InvalidInput, OutOfSpace, TargetFailed, TargetMissing
from edgekit.model.source import open_source
from edgekit.testing import write_adapter

PI, PIXEL = ("--device", "raspberry-pi-5-8gb"), ("--device", "pixel-9")
pytestmark = pytest.mark.quantize


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("torch")
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(ExecutorchTarget, "missing", lambda self: "executorch is not installed; pip install it")
    return tmp_path / "home"


def export(*arguments: str | Path) -> Result:
    return CliRunner().invoke(
        command, ["export", "demo-draft", "--context", "256", *map(str, arguments)], standalone_mode=False
    )


@pytest.mark.onnx
def test_a_device_whose_package_is_missing_is_listed_and_the_others_are_built(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    done = export(*PIXEL, *PI, "--recipe", "s4-g64", "--effort", "quick", "-o", tmp_path / "out", "--json")
    assert done.return_value == 2, done.output
    events = [json.loads(line) for line in done.stdout.splitlines()]
    (sealed,) = (each for each in events if each["event"] == "sealed")
    assert sealed["device"] == "raspberry-pi-5-8gb" and "-" in sealed["range"] and sealed["origin"]
    assert events[-1]["event"] == "refused" and "executorch is not installed" in events[-1]["error"]
    assert read_manifest(tmp_path / "out/raspberry-pi-5-8gb").plan.recipe.name == "s4-g64"
    assert not (tmp_path / "out/pixel-9").exists()


@pytest.mark.onnx
def test_what_was_built_is_said_when_a_later_device_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(plan: Plan, *given: Any, **named: Any) -> Artifact:
        if plan.device == "laptop-x86-16gb":
            raise TargetFailed("the self-check found a fault")
        return build_one(plan, *given, **named)

    monkeypatch.setattr("edgekit.api.build_one", build)
    quick = ("--recipe", "s4-g64", "--target", "onnx", "--effort", "quick", "-o", tmp_path / "out")
    too_slow = ("--device", "raspberry-pi-4-8gb", "--min-tokens-per-second", "1700")
    done = export(*PI, "--device", "laptop-x86-16gb", *too_slow, *quick)
    assert done.return_value == 2 and f"{tmp_path / 'out/raspberry-pi-5-8gb'}: demo-draft for" in done.stdout
    assert "not built for laptop-x86-16gb: the self-check found a fault" in done.stderr
    assert "not built for raspberry-pi-4-8gb: 'demo-draft' does not fit raspberry-pi-4-8gb as asked" in done.stderr
    assert isinstance(export("--device", "laptop-x86-16gb", *quick[:-1], tmp_path / "alone").exception, TargetFailed)


def test_a_missing_package_is_reported_before_any_work(tmp_path: Path, home: Path) -> None:
    done = export(*PIXEL, "-o", tmp_path / "out")
    assert isinstance(done.exception, TargetMissing) and "executorch is not installed" in str(done.exception)
    assert not (home / "weights").exists() and not (tmp_path / "out").exists()


def test_output_path_and_disk_space_are_checked_before_any_work(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    assert isinstance(export(*PI, "-o", tmp_path / "out").exception, InvalidInput)
    monkeypatch.setattr("edgekit.artifact.export.free_bytes", lambda path: 1000)
    assert isinstance(export(*PI, "-o", tmp_path / "new").exception, OutOfSpace)
    assert not (home / "weights").exists()


@pytest.mark.onnx
def test_prepare_packs_the_weights_for_this_machine_and_refuses_others(tmp_path: Path, home: Path) -> None:
    pytest.importorskip("onnxruntime")
    quick = ("--target", "onnx", "--recipe", "s4-g64", "--adapter-rank", "4", "--effort", "quick", "--prepare")
    done = export("--device", "this", *quick, "-o", tmp_path / "out")
    assert done.return_value == 0, done.output
    assert len(list((home / "packed").glob("*/packed.json"))) == 1
    assert "demo-draft s4-g64, packed for this processor" in CliRunner().invoke(command, ["store", "ls"]).output
    adapter = write_adapter(tmp_path / "tone", open_source("demo-draft").spec, rank=4)
    again = edgekit.export(
        "demo-draft",
        tmp_path / "again",
        target="onnx",
        recipe="s4-g64",
        adapters={"tone": adapter},
        adapter_rank=4,
        context=256,
        effort="quick",
        with_bom=True,
        prepare=True,
    )
    assert again.manifest.files["bom.cdx.json"].bytes
    with edgekit.open(again.folder) as runtime:
        runtime.load_adapter("tone")
        assert runtime.generate("def", max_tokens=2, adapter="tone").text
    assert len(list((home / "packed").glob("*/packed.json"))) == 1, "equal weights are packed once"
    with pytest.raises(InvalidInput, match="prepare: works for device this"):
        edgekit.export("demo-draft", tmp_path / "other", "raspberry-pi-5-8gb", prepare=True)
    refused = export(*PI, *quick, "-o", tmp_path / "other")
    assert isinstance(refused.exception, InvalidInput) and "not for raspberry-pi-5-8gb" in str(refused.exception)
    assert not (tmp_path / "other").exists()


def test_options_fixed_by_a_plan_are_refused(tmp_path: Path) -> None:
    done = export("--plan", "plan.json", "--recipe", "s8", "-o", tmp_path / "out")
    assert "--plan plan.json decides everything; leave out --context, --recipe" in str(done.exception)


def test_remaining_time_is_shown_after_two_seconds() -> None:
    assert time_left(0, 10, 60) == time_left(5, 10, 1) == time_left(10, 10, 60) == ""
    assert time_left(5, 10, 60) == ", about 60 s left"
    assert time_left(1, 10, 60) == ", about 9 min left"
