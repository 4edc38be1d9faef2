"""What plans expect of recipes: `--min-quality` accepts nothing that was measured to be worse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import configs
import pytest
import shapes
from click.testing import CliRunner, Result

from edgekit.cli import command
from edgekit.contracts.recipe import Format, Recipe, Rule, named_recipe, with_budget
from edgekit.errors import DoesNotFit
from edgekit.model.source import open_source
from edgekit.planner import quality_priors
from edgekit.planner.quality_priors import prior, quality_rows
from examples.benchmarks import measured_page

pytestmark = pytest.mark.usefixtures("home")  # without what was measured here

DEVICES = {"onnx": "laptop-x86-8gb", "llamacpp": "laptop-x86-8gb", "executorch": "pixel-9", "mlx": "macbook-m4-16gb"}
GEMMA = shapes.GEMMA_3_1B | {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18}
SPECS = {
    "demo": open_source("demo").spec,
    "SmolLM2-135M": shapes.spec_of(configs.SMOLLM2_135M, "SmolLM2-135M"),
    "Gemma 3 270M": shapes.spec_of(GEMMA, "Gemma 3 270M"),
}


def edgekit(*words: str | Path) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words])


def test_rows_are_those_of_the_script() -> None:
    assert measured_page.QUALITY_ROWS.read_text() == measured_page.quality_rows_text()
    found = {(row.model, row.family, row.parameters) for row in quality_rows()}
    assert found == {(name, spec.family, spec.parameters) for name, spec in SPECS.items()}


def test_no_stored_row_is_worse_than_what_is_accepted_for_it() -> None:
    checked, names, rows = 0, {}, []
    for model, (stored, shown) in measured_page.MODELS.items():
        names[model] = names[stored] = shown.partition(",")[0]
    for row in measured_page.stored_rows():
        texts = [(text["kl_mean"], text["same_top"]) for text in row["quality"].values()]
        rows.append((row, [row["target"]], row["stored_as"], texts))
    for row in measured_page.stored("quality.json")["rows"]:
        if row["file_bytes"] is None:  # files of other engines have no recipe
            recipe = re.sub(r" at the bytes of \w+", f"-to-{row['bits_per_weight']}", row["recipe"])
            texts = [(fmean(text["kl"]), fmean(text["same_top"])) for text in row["text"].values()]
            held = [each for each in DEVICES if recipe != "small" or (each == "llamacpp") == (row["method"] == "none")]
            rows.append((row, held, recipe, texts))
    for row, targets, name, texts in rows:
        spec, (base, _, bits) = SPECS[names[row["model"]]], name.partition("-to-")
        recipe = with_budget(named_recipe(base), spec, float(bits)) if bits else named_recipe(base)
        for target in targets:
            found = prior(recipe, spec, target, row["method"])
            for kl, same_top in texts:
                assert found.same_top is not None and found.same_top <= same_top + 1e-9, (name, target)
                assert found.loss >= kl * 0.995, (name, target)
                checked += 1
    assert checked > 400


@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("recipe", ["s4-g64", "s8"])
def test_a_floor_above_the_worst_row_is_refused(target: str, recipe: str, tmp_path: Path) -> None:
    key = ("demo", target, recipe, "rtn")
    (row,) = (row for row in quality_rows() if (row.model, row.target, row.recipe, row.method) == key)
    words = ("demo", "--device", DEVICES[target], "--target", target, "--recipe", recipe)
    floor = ("--effort", "quick", "--min-quality", f"{row.same_top + 1e-4:.4f}", "-o", tmp_path / "out")
    refused = edgekit("export", *words, *floor).exception
    assert isinstance(refused, DoesNotFit) and not (tmp_path / "out").exists()
    assert f"quality ~{row.same_top:.3f}, allowed" in str(refused)


def test_a_measured_phone_is_not_promised_more() -> None:
    words = ("plan", "demo", "--device", "pixel-9")
    assert json.loads(edgekit(*words, "--min-quality", "0.98", "--json").output)[0]["recipe"]["name"] == "float16"
    assert "XNNPACK stores float16 in 32 bits" in edgekit(*words, "--min-quality", "0.98").output
    found = edgekit(*words, "--recipe", "s8", "--explain").output
    assert "0.961 of top tokens kept, KL 0.0013 to 0.0016" in found and "source   measured on demo" in found
    assert "demo: s8 gptq on executorch, s8 rtn on executorch, held-out code, prose and chats" in found


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (configs.SMOLLM2_135M, "as SmolLM2-135M, near in size and family"),
        (configs.QWEN_25_HALF_B, "as Gemma 3 270M and SmolLM2-135M, near in size"),
        (configs.MISTRAL_7B, "the worst of other sizes"),
    ],
)
def test_a_plan_says_which_model_was_measured(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert f"source   {said}" in edgekit("plan", tmp_path, "--device", "macbook-m4-16gb").output


def test_what_was_not_measured_is_said_and_meets_no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in quality_rows() if row.recipe != "mxfp4"]
    monkeypatch.setattr(quality_priors, "quality_rows", lambda: rows)
    quality_priors._worst.cache_clear()
    words = ("plan", "demo", "--device", "macbook-m4-16gb", "--target", "mlx", "--recipe", "mxfp4")
    found = edgekit(*words).output
    assert "quality  not measured\n" in found and "source   mxfp4 was not measured on any model" in found
    refused = str(edgekit(*words, "--min-quality", "0.1").exception)
    assert "quality not measured, allowed 0.1" in refused and "\n" not in refused
    quality_priors._worst.cache_clear()


def test_a_recipe_of_ones_own_counts_as_the_worst_of_its_formats() -> None:
    eight, four = Format(kind="s8"), Format(kind="s4", group=64)
    own = Recipe(name="own", rules=(Rule(pattern="*.down_proj", format=eight), Rule(pattern="*", format=four)))
    found, coarse = (prior(each, SPECS["demo"], "onnx", "rtn") for each in (own, named_recipe("s4-g64")))
    assert (found.loss, found.same_top) == (coarse.loss, coarse.same_top)
    finer = [prior(named_recipe(name), SPECS["demo"], "onnx", "rtn") for name in ("s8", "balanced", "s4-g32", "s4-g64")]
    assert [each.loss for each in finer] == sorted(each.loss for each in finer)
