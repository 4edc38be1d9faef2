"""Bundled artifacts are whole and current, and every target gets the quantised integers from them, without torch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import edgekit
from edgekit.artifact import rebuilding
from edgekit.artifact.artifact import Artifact, open_artifact, read_manifest, verify
from edgekit.calibrating import calibration_for
from edgekit.common import files
from edgekit.common.content_store import ContentStore
from edgekit.common.cores import UsableCores
from edgekit.common.sealed_json import to_sealed_json
from edgekit.contracts.neutral import NeutralWeights, weights_store
from edgekit.contracts.recipe import Recipe
from edgekit.contracts.weights_reference import BUNDLED_WEIGHTS, REFERENCE, read_reference, reference_place
from edgekit.errors import DamagedArtifact, TargetMissing
from edgekit.formats.safetensors import TensorFolder
from edgekit.model.source import BUNDLED, BUNDLED_ARTIFACTS, ModelSource, open_source
from edgekit.planner.request import find_recipe
from edgekit.quant import pipeline
from edgekit.quant.calibration import Calibration
from edgekit.quant.pipeline import bundled_key, neutral_weights
from edgekit.runtime import open as opening
from examples.training.quantise_demo import make


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def inputs(name: str) -> tuple[ModelSource, Recipe, Calibration | None]:
    source, recipe = open_source(name, need_weights=True), find_recipe("balanced")
    return source, recipe, calibration_for(source, [recipe])


def read_back(name: str, monkeypatch: pytest.MonkeyPatch) -> NeutralWeights:
    """The weights of a bundled model on a machine with neither torch nor any target's library."""

    def refuse(*_: object) -> None:
        raise AssertionError("read by a target, or quantised again")

    monkeypatch.setattr(pipeline, "find_spec", lambda name: None)
    monkeypatch.setattr(Artifact, "target", refuse)
    source, recipe, calibration = inputs(name)
    return neutral_weights(source, recipe, calibration=calibration, rebuild=rebuilding.rebuilding(refuse))


def test_bundled_artifacts_and_references_are_current() -> None:
    """After a change of models, recipe, text or quantiser: python -m examples.training.quantise_demo."""
    expected = {reference_place(BUNDLED_WEIGHTS, bundled_key(*inputs(name))) for name in BUNDLED}
    assert set(BUNDLED_WEIGHTS.root.iterdir()) == expected
    assert {place.name for place in BUNDLED_ARTIFACTS.iterdir()} == set(BUNDLED)


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_artifacts_are_whole_and_of_no_machine(name: str) -> None:
    artifact = verify(BUNDLED_ARTIFACTS / name)
    assert artifact.plan.device != "this" and not artifact.plan.facts
    assert artifact.manifest.self_check.startswith("KL 0.000"), "compared with the reference when it was made"


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_weights_are_read_out_of_the_artifact_and_near_the_float_weights(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = read_back(name, monkeypatch)
    weights.verify()
    assert weights.sha256 == open_artifact(BUNDLED_ARTIFACTS / name).manifest.weights_sha256
    assert weights.manifest.method == "gptq"
    with TensorFolder.open(open_source(name, need_weights=True).weights) as floats:
        for module in weights.modules():
            expected = floats.floats(f"{module}.weight")
            error = np.square(weights.dequantised(module) - expected).sum() / np.square(expected).sum()
            assert error < 0.02, module


def test_another_recipe_of_a_bundled_model_needs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    source, _, calibration = inputs("demo")
    monkeypatch.setattr(pipeline, "find_spec", lambda name: None)
    with pytest.raises(TargetMissing, match="torch"):
        neutral_weights(source, find_recipe("s4-g64"), calibration=calibration)


@pytest.mark.slow
@pytest.mark.quantize
@pytest.mark.parametrize("name", BUNDLED)
def test_quantising_again_chooses_weights_as_good(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gptq sums in another order on another processor, so a few roundings differ: 5 % for `demo` on one of ours."""
    pytest.importorskip("torch")
    source, recipe, calibration = inputs(name)
    again = neutral_weights(source, recipe, calibration=calibration, store=ContentStore(tmp_path))
    bundled = read_back(name, monkeypatch)
    assert again.recipe == bundled.recipe
    same = total = 0
    for module in bundled.modules():
        ours, theirs = bundled.integers(module), again.integers(module)
        same, total = same + int((ours == theirs).sum()), total + ours.size
        first, second = (each.manifest.statistics[module].output_error for each in (bundled, again))
        assert first is None or second == pytest.approx(first, rel=0.1), module
    assert same > 0.9 * total


@pytest.mark.onnx
@pytest.mark.parametrize("name", BUNDLED)
def test_the_script_makes_the_same_artifact_and_reference_again(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    make(name, ContentStore(tmp_path / "store"), tmp_path / "artifacts", tmp_path / "references")
    again, ours = (read_manifest(folder / name) for folder in (tmp_path / "artifacts", BUNDLED_ARTIFACTS))
    changed = [file for file, fact in ours.manifest.files.items() if again.manifest.files.get(file) != fact]
    # The steps are measured: their last bits are the processor's.
    assert set(changed) <= {"kv-steps.safetensors"} and again.manifest.files.keys() == ours.manifest.files.keys()
    assert again.plan.recipe == ours.plan.recipe and again.plan.device_sha256 == ours.plan.device_sha256
    (place,) = (tmp_path / "references").iterdir()
    made, bundled = read_reference(place), read_reference(BUNDLED_WEIGHTS.root / place.name)
    assert made.held == bundled.held and made.weights_sha256 == bundled.weights_sha256
    assert Path(made.artifact) == again.folder


@pytest.mark.onnx
def test_a_bundled_artifact_opens_where_an_installer_linked_it_from_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    shutil.copytree(BUNDLED_ARTIFACTS / "demo-draft", tmp_path / "package/demo-draft")
    (tmp_path / "cache").mkdir()
    for path in (tmp_path / "package/demo-draft").iterdir():
        os.link(path, tmp_path / "cache" / path.name)
    with pytest.raises(DamagedArtifact, match="2 names"):
        edgekit.open(tmp_path / "package/demo-draft")
    monkeypatch.setattr(files, "PACKAGE", (tmp_path / "package").resolve())
    with edgekit.open(tmp_path / "package/demo-draft") as runtime:
        assert len(runtime.generate("def add(a, b):", max_tokens=4).tokens) == 4


def test_an_export_leaves_no_copy_of_bundled_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        sha256 = read_back("demo-draft", patch).sha256
    artifact, store = open_artifact(BUNDLED_ARTIFACTS / "demo-draft"), weights_store()
    assert len(store.folders()) == 1
    assert rebuilding.free_copy(artifact, store) > 700_000
    assert not store.folders(), "the package's reference suffices"
    again = rebuilding.stored_weights(store, sha256, print)
    assert again is not None and again.sha256 == sha256


@pytest.mark.onnx
def test_a_bundled_artifact_takes_no_more_threads_than_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("onnxruntime")
    assert open_artifact(BUNDLED_ARTIFACTS / "demo-draft").plan.threads == 4
    monkeypatch.setattr(opening, "usable_cores", lambda: UsableCores(1, "a mask of one core"))
    with caplog.at_level("INFO", "edgekit"), edgekit.open(BUNDLED_ARTIFACTS / "demo-draft") as runtime:
        assert runtime.engine.plan.threads == 1  # type: ignore[attr-defined]
    assert "computing with 1 threads where 4 were planned: a mask of one core" in caplog.text


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a copy of the bundled artifacts and references, which is used in their place."""
    for part in (BUNDLED_ARTIFACTS, BUNDLED_WEIGHTS.root):
        shutil.copytree(part, tmp_path / part.name)
    monkeypatch.setattr(rebuilding, "BUNDLED_WEIGHTS", ContentStore(tmp_path / BUNDLED_WEIGHTS.root.name))
    return tmp_path


def why_not_rebuilt(folder: Path) -> str:
    """Return why the weights of `demo-draft` were not rebuilt, having checked that nothing is left of the attempt."""
    said: list[str] = []
    folder.mkdir()
    assert not rebuilding.rebuilding(said.append)(weights_store(), bundled_key(*inputs("demo-draft")), folder)
    assert not any(folder.iterdir())
    (text,) = said
    return text


def test_a_bundled_artifact_of_other_bytes_gives_no_weights(copied: Path) -> None:
    data = bytearray((copied / "artifacts/demo-draft/weights.bin").read_bytes())
    data[1000] ^= 1
    (copied / "artifacts/demo-draft/weights.bin").write_bytes(data)
    assert "its bytes are not those that were sealed" in why_not_rebuilt(copied / "folder")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "elsewhere.bin"}, "'elsewhere.bin' cannot hold a tensor"),
        ({"offset": 1 << 40}, "weights.bin is too short for a tensor at 1,099,511,627,776"),
        ({"is_widened": True}, "'weights.bin' cannot hold a tensor I32"),
        ({"offset": 1}, "gives other weights than it was packed from"),
    ],
)
def test_a_reference_that_names_other_places_gives_no_weights(
    change: dict[str, object], message: str, copied: Path
) -> None:
    place = reference_place(rebuilding.BUNDLED_WEIGHTS, bundled_key(*inputs("demo-draft")))
    reference = read_reference(place)
    name = next(name for name in reference.held if name.endswith("weight_packed"))
    held = {**reference.held, name: reference.held[name].model_copy(update=change)}
    (place / REFERENCE).write_bytes(to_sealed_json(reference.model_copy(update={"held": held})))
    assert message in why_not_rebuilt(copied / "folder")
