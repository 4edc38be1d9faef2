"""`edgekit choose` and the table of known models behind it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from edgekit.cli import command
from edgekit.model.known_models import KnownModel, known_models


def choose(*arguments: str) -> Result:
    return CliRunner().invoke(command, ["choose", *arguments])


@pytest.mark.parametrize("model", known_models().models, ids=lambda model: model.id)
def test_the_shapes_of_a_known_model_give_its_published_size(model: KnownModel) -> None:
    """The tolerance is the rounding in the model's name; a wrong width or an untied head would exceed it."""
    assert model.source().spec.parameters == pytest.approx(model.published_parameters, rel=0.1)
    assert model.source().spec.exportable is None
    assert model.sources and set(model.sources) <= set(known_models().sources)


def test_the_largest_model_that_fits_comes_first_and_the_next_command_plans_it() -> None:
    found = choose("--device", "pixel-8", "--task", "code", "--json")
    assert found.exit_code == 0, found.output
    rows = json.loads(found.output)["models"]
    assert rows and all(row["task"] == "code" for row in rows)
    assert [row["parameters"] for row in rows] == sorted((row["parameters"] for row in rows), reverse=True)
    fitting = [row["model"] for row in rows if row["fits"]]
    assert 0 < len(fitting) < len(rows)  # 4 GiB for one app: not everything
    fast = choose("--device", "pixel-8", "--task", "code", "--min-tokens-per-second", "20", "--all").output
    assert f"{fitting[0]}: no: " in fast and f"next: edgekit plan {fitting[-1]} --device pixel-8" in fast


def test_models_for_embeddings_are_planned_on_the_target_that_gives_them() -> None:
    rows = json.loads(choose("--task", "embed", "--device", "raspberry-pi-5-8gb", "--json").output)["models"]
    assert rows and all(row["task"] == "embed" and row["fits"] and row["as"].startswith("onnx") for row in rows)
    shown = choose("--task", "embed", "--device", "raspberry-pi-5-8gb").output
    assert "--device raspberry-pi-5-8gb --target onnx" in shown
    phone = choose("--task", "embed", "--device", "iphone-16-pro").output
    assert f"0 of {len(rows)} known models fit" in phone and "next:" not in phone
    assert phone.startswith("iphone-16-pro: 2.79 GiB for one app (6 GiB with mapped"), "what plan allows"
