"""`edgekit sweep`: every recipe is built, measured and evaluated, and the report names dominated ones."""

from __future__ import annotations

import json
from pathlib import Path

import measured
import pytest
import tiny_models

from edgekit.apps.bench.report.results import Report, read_report
from edgekit.apps.bench.sweep import sweep
from edgekit.common.progress import no_progress
from edgekit.contracts.recipe import named_recipe
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnx_ir")
pytestmark = [pytest.mark.quantize, pytest.mark.onnx]


@pytest.mark.slow
def test_a_sweep_leaves_artifacts_reports_and_a_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    arguments = tiny_models.sweep_of_tiny(tmp_path)
    done = measured.invoked([*arguments, "--recipes", "s4-g32,s8"])
    assert done.code == 0, done.output
    found = read_report(tmp_path / "out/report.json")
    assert [point.name for point in found.points] == ["s4-g32", "s8"]
    assert [each.recipe for each in found.evaluations] == ["s4-g32", "s8"]
    assert len(found.measurements) == 2
    assert "<!doctype html>" in (tmp_path / "out/report.html").read_text()
    assert "Recipes" in (tmp_path / "out/report.md").read_text()
    known = all(point.decode_tokens_per_s is not None for point in found.points)
    assert (tmp_path / "out/pareto.png").exists() or not known
    before = (tmp_path / "out/s8/manifest.json").stat().st_mtime_ns
    again = measured.invoked([*arguments, "--recipes", "s8,mxfp4", "--json"])
    assert Report.model_validate_json(again.stdout).points[0].name == "s8"
    assert any(note.startswith("mxfp4: not built") for note in json.loads(again.stdout)["notes"])
    assert (tmp_path / "out/s8/manifest.json").stat().st_mtime_ns == before, "an artifact was built twice"


def test_a_sweep_of_nothing_is_refused(tmp_path: Path) -> None:
    model = tiny_models.write_tiny(tmp_path / "tiny")

    def make_plan(name: str) -> object:
        return make_plans(str(model), [tiny_models.DEVICE], PlanRequest(recipe=named_recipe(name), target="onnx"))[0]

    def swept(*recipes: str) -> object:
        return sweep(recipes, make_plan, tmp_path / "out", measured.workload(), progress=no_progress)  # type: ignore[arg-type]

    assert "named twice" in measured.refused(lambda: swept("s8", "s8"))
    assert "none of these recipes" in measured.refused(lambda: swept("mxfp4"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--text", "absent.txt"], "absent.txt: cannot be read"),
        (["--calibrate", "absent.txt"], "absent.txt: cannot be read"),
        (["-w", "nonsense"], "unknown workload 'nonsense'"),
        (["-o", "in-the-way"], "cannot be written"),
    ],
    ids=["text", "calibration", "workload", "output"],
)
def test_bad_sweep_inputs_are_refused_before_the_first_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in-the-way").write_text("a file")
    told = measured.refused(lambda: measured.invoked(["sweep", "demo", "--recipes", "s8", "-o", "out", *options]))
    assert said in told
    assert not (tmp_path / "out").exists()
