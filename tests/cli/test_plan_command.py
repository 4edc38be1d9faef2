"""`edgekit plan` and `edgekit choose`: output, exit codes and one-line errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import shapes
from click.testing import CliRunner, Result

from edgekit.cli import command
from edgekit.common.parsing import validate
from edgekit.contracts.plan import Plan
from edgekit.errors import DoesNotFit, EdgekitError, InvalidInput, Unsupported
from edgekit.model.known_models import KnownModel, known_models
from edgekit.planner.make import read_plan


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "Llama-3.2-1B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shapes.LLAMA_32_1B))
    return folder


def plan(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, ["plan", *map(str, arguments)])


def refused(*arguments: str | Path) -> str:
    """Return the one-line error."""
    found = plan(*arguments)
    assert isinstance(found.exception, EdgekitError), found.output + repr(found.exception)
    assert "\n" not in str(found.exception)
    return str(found.exception)


def test_plan_is_printed_with_memory_classes_budget_and_rejected_count(model: Path) -> None:
    found = plan(model, "--device", "macbook-m4-16gb")
    assert found.exit_code == 0
    for part in (
        "as mlx metal balanced",
        "private weights",
        "cache",
        "allowed",
        "decode",
        "quality",
        "25 fit and 16 do not; --all lists them",
        f"next: edgekit export {model} --device macbook-m4-16gb -o Llama-3.2-1B.edgekit",
    ):
        assert part in found.output, found.output
    assert "not taken" not in found.output


def test_all_lists_rejected_candidates_and_marks_priors(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown = plan(model, "--device", "macbook-m4-16gb", "--all").output
    assert "not taken" in shown and "onnx cpu" in shown
    assert "~0.9" in shown


def test_several_devices_have_one_row_each_within_80_columns(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    devices = ("pixel-9", "raspberry-pi-5-8gb", "iphone-16-pro")
    lines = plan(model, *(word for name in devices for word in ("--device", name))).output.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [[name, "fits"] for name in devices]
    assert all(len(line) <= 80 for line in lines[:5])


def test_a_device_that_cannot_have_the_model_is_marked_beside_the_others(model: Path) -> None:
    slow, no_format = ("rtx-4090", "--min-tokens-per-second", "99"), ("macbook-m4-16gb", "--recipe", "mxfp4")
    for error, (other, *asked) in ((DoesNotFit, slow), (Unsupported, no_format)):
        found = plan(model, "--device", "galaxy-s22", "--device", other, *asked)
        assert isinstance(found.exception, error)
        assert [line.split()[:2] for line in found.output.splitlines()[1:3]] == [[other, "fits"], ["galaxy-s22", "NO"]]


def test_a_refused_offer_shows_the_targets_reason(model: Path) -> None:
    shown = " ".join(plan(model, "--device", "pixel-9", "--all").output.split())
    assert "not offered: recipe s4-g32 on vulkan" in shown


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("s4-g16", "did you mean s4-g64?"),
        ("q4_k_m", "recipe 'q4_k_m' is llama.cpp's; the nearest one here is s4-g32"),
        ("Q8_0", "the nearest one here is s8"),
    ],
)
def test_an_unknown_recipe_has_a_hint(model: Path, name: str, hint: str) -> None:
    assert hint in refused(model, "--recipe", name)


def test_explain_prints_the_arithmetic(model: Path) -> None:
    found = plan(model, "--device", "macbook-m4-16gb", "--context", "4096", "--explain")
    assert "1 × (16 layers × 2 × 8 heads × 64 × 4,096 tokens) × 16 bit" in found.output
    assert "over" in found.output and "GB/s" in found.output


def test_json_holds_whole_plans(model: Path) -> None:
    found = plan(model, "--device", "pixel-9", "--device", "rtx-4090", "--json")
    plans = [validate(json.dumps(each), Plan, "stdout") for each in json.loads(found.output)]
    assert [each.device for each in plans] == ["pixel-9", "rtx-4090"]
    assert len({each.recipe.name for each in plans}) == 1, "several devices share one quantisation"


def test_a_written_plan_is_read_again(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    found = plan(model, "--device", "pixel-9", "-o", out)
    assert f"edgekit export {model} --plan {out}" in found.output
    first = out.read_bytes()
    assert read_plan(out).device == "pixel-9"
    plan(model, "--device", "pixel-9", "-o", out)
    assert out.read_bytes() == first, "the same question has the same answer, byte for byte"


def test_a_newer_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"version": 99}')
    with pytest.raises(InvalidInput, match="upgrade edgekit"):
        read_plan(tmp_path / "plan.json")


def test_if_nothing_fits_a_table_is_shown_and_exit_code_is_3(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edgekit", "plan", str(model), "--device", "iphone-13", "--memory", "60MiB"],
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == DoesNotFit.exit_code == 3
    lines = done.stdout.splitlines()
    assert "needs" in done.stdout and "iphone-13: nothing fits" in lines[0]
    assert max(map(len, lines)) <= 80 and lines[-1].endswith("more do not fit either; edgekit plan --all lists them")
    assert done.stderr.count("\n") == 1 and "does not fit iphone-13" in done.stderr


def test_if_nothing_fits_json_has_the_same_facts(model: Path) -> None:
    found = plan(model, "--device", "iphone-13", "--memory", "60MiB", "--json")
    assert found.exit_code == 3
    answer = json.loads(found.output)
    assert answer["rejected"]["iphone-13"][0]["failures"][0]["what"] == "memory"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "pixel-99"], ["pixel-99", "pixel-9"]),
        (["--device", "pixel-9", "--target", "tensorrt"], ["tensorrt", "onnx"]),
        (["--device", "pixel-9", "--target", "mlx"], ["pixel-9", "mlx", "executorch"]),
        (["--device", "pixel-9", "--recipe", "none.yaml"], ["none.yaml", "cannot be read"]),
        (["--device", "pixel-9", "--context", "-5"], ["--context", "-5"]),
        (["--device", "pixel-9", "--min-quality", "7"], ["--min-quality", "7"]),
        (["--device", "pixel-9", "--min-tokens-per-second", "nan"], ["--min-tokens-per-second", "nan"]),
        (["--device", "pixel-9", "--memory", "lots"], ["--memory", "lots", "1.5GiB"]),
        (["--device", "pixel-9", "--window", "3", "--sinks", "3"], ["--window 3 --sinks 3"]),
        (["--device", "pixel-9", "--sinks", "3"], ["sinks", "window"]),
        (["--device", "pixel-9", "--draft", "nowhere"], ["nowhere"]),
        (["--device", "pixel-9", "--os-version", "sixteen"], ["sixteen"]),
        (["--device", "a", "--device", "b", "-o", "x"], ["--output", "2 devices"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_options_are_refused_in_one_line(model: Path, arguments: list[str], words: list[str]) -> None:
    line = refused(model, *arguments)
    for word in words:
        assert word in line, line


def test_a_plan_notes_rounding_without_calibration_text(model: Path) -> None:
    said = " ".join(plan(model, "--device", "pixel-9").output.split())
    assert "export rounds weights to the nearest (rtn), which loses 1.4 to 4 times as much" in said
    exact = plan("demo", "--device", "laptop-x86-16gb", "--recipe", "float32").output
    assert "float32" in exact and "rtn" not in exact


def test_unsupported_bits_are_refused_in_one_line(model: Path) -> None:
    assert refused(model, "--device", "pixel-9", "--kv-bits", "7").startswith("--kv-bits 7: no target keeps")


def test_this_machine_is_planned_with_what_is_installed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgekit_mlx import MlxTarget

    monkeypatch.setattr(MlxTarget, "missing", lambda self: "mlx is not installed")
    found = plan("demo", "--all")
    assert found.exit_code == 0, found.output
    assert "mlx cpu" not in found.output and "absent   mlx: not installed here" in found.output
    assert "mlx cpu" in plan("demo", "--target", "mlx").output  # by name it is planned as before


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
    rows = json.loads(found.stdout)["models"]
    assert rows and all(row["task"] == "code" for row in rows)
    order = [(row["needs_account"], -row["parameters"]) for row in rows]
    assert order == sorted(order) and len(known_models().models) >= 40
    fitting = [row["model"] for row in rows if row["fits"]]
    assert 0 < len(fitting) < len(rows)  # 4 GiB for one app: not everything
    fast = choose("--device", "pixel-8", "--task", "code", "--min-tokens-per-second", "20", "--all").stdout
    assert f"{fitting[0]}: no: " in fast and f"next: edgekit plan {fitting[-1]} --device pixel-8" in fast


def test_models_for_embeddings_are_planned_on_the_target_that_gives_them() -> None:
    rows = json.loads(choose("--task", "embed", "--device", "raspberry-pi-5-8gb", "--json").stdout)["models"]
    assert rows and all(row["task"] == "embed" and row["fits"] and row["as"].startswith("onnx") for row in rows)
    shown = choose("--task", "embed", "--device", "raspberry-pi-5-8gb").stdout
    assert "--device raspberry-pi-5-8gb --target onnx" in shown
    phone = choose("--task", "embed", "--device", "iphone-16-pro").stdout
    assert f"0 of {len(rows)} known models fit" in phone and "next:" not in phone
    assert phone.startswith("iphone-16-pro: 2.79 GiB for one app (6 GiB with mapped"), "what plan allows"
