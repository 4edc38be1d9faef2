"""The artifact and neutral weights of `demo` in the package are whole and current, and need no floats of a clone."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
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
from edgekit.contracts.neutral import NeutralWeights
from edgekit.errors import DamagedArtifact, InvalidInput
from edgekit.model import source as sources
from edgekit.model.source import DEMO_ARTIFACT, DEMO_WEIGHTS, open_source
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest, find_recipe
from edgekit.plugins import load_target, target_names
from edgekit.runtime import open as opening
from examples.training.quantise_demo import DEVICE, RECIPE

pytestmark = pytest.mark.usefixtures("home")


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
    shipped = NeutralWeights.open(DEMO_WEIGHTS, verify=True)
    assert (shipped.sha256, shipped.recipe) == (made.manifest.weights_sha256, sealed)
    assert shipped.manifest.source_files == origin.source_files


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


@pytest.mark.llamacpp
@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
def test_a_wheel_plans_exports_and_runs_demo_for_any_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_DEMO_FLOATS", tmp_path / "none")  # which a clone has
    for name in set(target_names()) - {"llamacpp"}:
        monkeypatch.setattr(type(load_target(name)), "missing", lambda _: "is not installed")
    shown = CliRunner().invoke(command, ["plan", "demo", "-o", str(tmp_path / "plan.json")])
    next_ = f"export demo --plan {tmp_path}/plan.json -o OUT"
    assert shown.output.endswith(f"written to {tmp_path}/plan.json; next: edgekit {next_}\n")
    exported = CliRunner().invoke(command, [*next_.split()[:-1], str(tmp_path / "out")])
    assert exported.exit_code == 0, exported.output
    ran = CliRunner().invoke(command, ["run", "demo", "def add(a, b):", "--max-tokens", "8"])
    assert ran.stderr.startswith("edgekit: making demo as llamacpp cpu balanced for this machine"), ran.output
    with pytest.raises(InvalidInput, match=r"demo-draft: only a clone of .* has it; give another model, or demo"):
        edgekit.plan("demo-draft")
