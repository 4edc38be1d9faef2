"""The artifact of `demo` in the package is whole and current, and answers without the float weights of a clone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import edgekit
from edgekit.artifact.artifact import open_artifact, verify
from edgekit.artifact.export import ExportOptions, export
from edgekit.calibrating import calibration_for
from edgekit.cli import command
from edgekit.common import files
from edgekit.common.cores import UsableCores
from edgekit.common.files import file_sha256
from edgekit.errors import DamagedArtifact, InvalidInput
from edgekit.model import source as sources
from edgekit.model.source import DEMO_ARTIFACT, open_source
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest, find_recipe
from edgekit.runtime import open as opening
from examples.training.quantise_demo import DEVICE, RECIPE

pytestmark = pytest.mark.usefixtures("home")

CONFIG = DEMO_ARTIFACT.parent / "model"


def test_the_artifact_is_whole_and_of_no_machine() -> None:
    artifact = verify(DEMO_ARTIFACT)
    assert artifact.plan.device == DEVICE and not artifact.plan.facts
    assert artifact.manifest.self_check.startswith("KL 0.000"), "compared with the reference when it was made"


def test_the_artifact_is_of_the_floats_the_recipe_and_the_text_of_today() -> None:
    """After a change of one of them: python -m examples.training.quantise_demo."""
    source, recipe, made = open_source("demo", need_weights=True), find_recipe(RECIPE), verify(DEMO_ARTIFACT)
    origin, text = made.manifest.origin, calibration_for(source, [recipe])
    assert origin is not None and text is not None
    for name, sha256 in origin.source_files.items():
        assert file_sha256(source.folder / name) == sha256, name
    assert (origin.calibration_sha256, origin.calibration_tokens) == (text.fact.sha256, text.fact.tokens)
    sealed = made.plan.recipe
    # Modules that were promoted to 8 bits have a rule each, before those of the recipe.
    assert sealed.model_copy(update={"rules": sealed.rules[-len(recipe.rules) :]}) == recipe
    for name in ("config.json", "generation_config.json"):
        assert (CONFIG / name).read_bytes() == (source.folder / name).read_bytes()


@pytest.mark.onnx
@pytest.mark.quantize
def test_an_export_of_today_writes_the_same_files_around_other_integers(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("torch")
    ours = verify(DEMO_ARTIFACT)
    plan = make_plans("demo", [DEVICE], PlanRequest(target="onnx", recipe=ours.plan.recipe))[0]
    again = export(plan, tmp_path / "again", ExportOptions(store=tmp_path / "store", method="rtn"))
    changed = [name for name, fact in ours.manifest.files.items() if again.manifest.files.get(name) != fact]
    assert set(changed) == {"weights.bin", "kv-steps.safetensors"}  # the steps of a cache are measured
    assert again.manifest.files.keys() == ours.manifest.files.keys()
    assert again.plan.device_sha256 == ours.plan.device_sha256


@pytest.mark.onnx
def test_the_artifact_opens_where_an_installer_linked_it_from_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    place = shutil.copytree(DEMO_ARTIFACT, tmp_path / "package/artifact")
    (tmp_path / "cache").mkdir()
    for path in place.iterdir():
        os.link(path, tmp_path / "cache" / path.name)
    with pytest.raises(DamagedArtifact, match="2 names"):
        edgekit.open(place)
    monkeypatch.setattr(files, "PACKAGE", (tmp_path / "package").resolve())
    with edgekit.open(place) as runtime:
        assert len(runtime.generate("def add(a, b):", max_tokens=4).tokens) == 4


@pytest.mark.onnx
def test_the_artifact_takes_no_more_threads_than_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("onnxruntime")
    assert open_artifact(DEMO_ARTIFACT).plan.threads == 4
    monkeypatch.setattr(opening, "usable_cores", lambda: UsableCores(1, "a mask of one core"))
    with caplog.at_level("INFO", "edgekit"), edgekit.open(DEMO_ARTIFACT) as runtime:
        assert runtime.engine.plan.threads == 1  # type: ignore[attr-defined]
    assert "computing with 1 threads where 4 were planned: a mask of one core" in caplog.text


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """edgekit as a wheel has it: without the floats of a clone."""
    monkeypatch.setattr(sources, "_DEMO_FLOATS", tmp_path / "none")


def test_without_the_floats_demo_is_planned_as_with_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    devices = ["raspberry-pi-5-8gb", "pixel-9", "laptop-x86-16gb"]
    in_a_clone = edgekit.plan("demo", devices)
    monkeypatch.setattr(sources, "_DEMO_FLOATS", tmp_path / "none")
    assert edgekit.plan("demo", devices) == in_a_clone
    shown = CliRunner().invoke(command, ["plan", "demo", "--device", "pixel-9", "-o", str(tmp_path / "plan.json")])
    assert shown.output.endswith(f'written to {tmp_path}/plan.json; next: edgekit run demo "def fibonacci(n):"\n')


def test_without_the_floats_nothing_is_exported_and_one_line_says_why(installed: None, tmp_path: Path) -> None:
    plan = edgekit.plan("demo", "laptop-x86-8gb", target="onnx")
    ready = r"model demo: only a clone of .* has its float weights; give another model, or use its ready art"
    with pytest.raises(InvalidInput, match=ready):
        edgekit.export("demo", tmp_path / "out")
    with pytest.raises(InvalidInput, match=ready):
        edgekit.export(plan, tmp_path / "out")
    with pytest.raises(InvalidInput, match=ready):
        edgekit.quantize("demo", "s8", tmp_path / "out")
    with pytest.raises(InvalidInput, match=r"demo-draft: only a clone of .* has it; give another model, or demo"):
        edgekit.plan("demo-draft")
    assert not list(tmp_path.glob("out*"))
