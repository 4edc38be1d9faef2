"""Bills of materials: valid, complete and the same each time."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_artifacts import make_artifact

from edgekit.artifact.artifact import read_manifest
from edgekit.artifact.bom import BOM_FILE, CARD_FILE, bill_of_materials, model_card
from edgekit.artifact.origin import _front_matter, _stated
from edgekit.cli import command
from edgekit.contracts.manifest import ModelOrigin
from edgekit.model.source import open_source


@pytest.fixture(scope="module")
def validator() -> Any:
    pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib, which has the schema, is not installed")
    jsonschema = pytest.importorskip("jsonschema")
    referencing = pytest.importorskip("referencing")
    place = files("cyclonedx") / "schema" / "_res"
    schema = json.loads((place / "bom-1.7.SNAPSHOT.schema.json").read_text())
    names = ("spdx", "jsf-0.82", "cryptography-defs")
    resources = []
    for name in names:
        content = json.loads((place / f"{name}.SNAPSHOT.schema.json").read_text())
        resource = referencing.Resource.from_contents(content, default_specification=referencing.jsonschema.DRAFT7)
        resources += [(f"{name}.SNAPSHOT.schema.json", resource), (content["$id"], resource)]
        resources.append((f"http://cyclonedx.org/schema/{name}.SNAPSHOT.schema.json", resource))
    registry = referencing.Registry().with_resources(resources)
    return jsonschema.Draft7Validator(schema, registry=registry)


@pytest.mark.parametrize("licence", ["apache-2.0", "gemma", None])
def test_a_bill_follows_the_schema(tmp_path: Path, validator: Any, licence: str | None) -> None:
    artifact = read_manifest(make_artifact(tmp_path / "artifact"))
    origin = ModelOrigin(
        licence=licence, base="a base", repository="a/b", revision="1" * 40, source_files={"x": "a" * 64}
    )
    manifest = artifact.manifest.model_copy(update={"origin": origin})
    bill = json.loads(bill_of_materials(manifest, artifact.sha256))
    assert [error.message for error in validator.iter_errors(bill)] == []
    model = bill["metadata"]["component"]
    expected = {
        "apache-2.0": [{"license": {"id": "Apache-2.0"}}],
        "gemma": [{"license": {"name": "gemma", "url": "https://ai.google.dev/gemma/terms"}}],
        None: None,
    }
    assert model.get("licenses") == expected[licence]
    assert {each["name"] for each in bill["components"]} >= set(manifest.files)
    assert list(validator.iter_errors({**bill, "components": [{"type": "nonsense"}]})) != []


def test_a_bill_names_what_runs_the_artifact_and_no_folder_of_the_builder(tmp_path: Path, validator: Any) -> None:
    artifact = read_manifest(make_artifact(tmp_path / "artifact"))
    plan = artifact.plan.model_copy(update={"target": "onnx", "model_source": "/home/me/secret/model.gguf"})
    tools = {"edgekit": "1", "onnxruntime": "1.31", "mlx": "0.3", "torch": "2.13.0+cpu", "xllamacpp": "2"}
    manifest = artifact.manifest.model_copy(update={"plan": plan, "tools": tools})
    bill = json.loads(bill_of_materials(manifest))
    assert [error.message for error in validator.iter_errors(bill)] == []
    assert [each["purl"] for each in bill["components"] if each["type"] == "library"] == ["pkg:pypi/onnxruntime@1.31"]
    assert set(bill["dependencies"][0]["dependsOn"]) == {each["bom-ref"] for each in bill["components"]}
    made_with = bill["metadata"]["tools"]["components"]
    assert [each["purl"] for each in made_with] == ["pkg:pypi/edgekit@1", "pkg:pypi/torch@2.13.0%2Bcpu"]
    card = model_card(manifest).decode()
    assert "## Runs with\n\n- onnxruntime 1.31\n\n## Made with\n\n- edgekit 1\n- torch 2.13.0+cpu\n" in card
    for text in (card, json.dumps(bill)):
        assert "secret" not in text and "model.gguf" in text


def test_figures_of_models_that_were_not_measured_are_called_predicted(tmp_path: Path) -> None:
    manifest = read_manifest(make_artifact(tmp_path / "artifact")).manifest
    quality = manifest.plan.quality.model_copy(update={"basis": "prior", "source": "another model"})
    for basis, words in (("prior", "predicted: another model"), ("measured", "measured: another model")):
        changed = manifest.plan.model_copy(update={"quality": quality.model_copy(update={"basis": basis})})
        manifest = manifest.model_copy(update={"plan": changed})
        figures = json.loads(bill_of_materials(manifest))["metadata"]["component"]["modelCard"]["quantitativeAnalysis"]
        assert {each["slice"] for each in figures["performanceMetrics"]} == {words}
        assert f"({words})" in model_card(manifest).decode()


def test_the_command_prints_the_same_bytes_each_time(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "artifact")
    first, second = (CliRunner().invoke(command, ["bom", str(folder)]) for _ in range(2))
    assert first.exit_code == 0 and first.output == second.output
    facts = {each["name"]: each["value"] for each in json.loads(first.output)["metadata"]["component"]["properties"]}
    assert facts["edgekit:artifact_sha256"] == read_manifest(folder).sha256
    assert facts["edgekit:licence"] == "not stated by the source"
    card = CliRunner().invoke(command, ["bom", str(folder), "--format", "card"])
    assert card.output.startswith("# ") and "| Licence | not stated by the source |" in card.output


@pytest.mark.onnx
@pytest.mark.slow
def test_an_export_holds_its_bill_and_card(tmp_path: Path, validator: Any) -> None:
    pytest.importorskip("onnxruntime")
    out = tmp_path / "demo"
    words = ["export", "demo-draft", "--target", "onnx", "--effort", "quick", "--with-bom", "-o", str(out)]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.output
    artifact = read_manifest(out)
    assert {BOM_FILE, CARD_FILE} <= set(artifact.manifest.files)
    bill = json.loads((out / BOM_FILE).read_bytes())
    assert [error.message for error in validator.iter_errors(bill)] == []
    assert bill["metadata"]["component"]["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    assert b"Apache-2.0" in (out / CARD_FILE).read_bytes()


def test_a_source_states_its_licence(tmp_path: Path) -> None:
    assert _stated(open_source("demo"))["licence"] == "Apache-2.0"
    assert _front_matter(b"---\nlicense: mit\nbase_model: [a/b]\n---\n# x")["license"] == "mit"
    assert _front_matter(b"---\na: &x [1]\nb: *x\n---\n") == {}
    assert _front_matter(b"# no front matter") == {}


def test_a_hostile_text_cannot_leave_its_cell(tmp_path: Path) -> None:
    manifest = read_manifest(make_artifact(tmp_path / "artifact")).manifest
    origin = ModelOrigin(licence="x|y\n# <script>")
    text = model_card(manifest.model_copy(update={"origin": origin})).decode()
    assert "| Licence | x\\|y # &lt;script> |" in text
