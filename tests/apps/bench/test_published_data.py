"""Published schemas match the code, and performance pages match their stored reports."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import measured
import pytest

from edgekit.apps.bench.report.performance import performance_pages, stored_reports
from edgekit.apps.bench.report.results import Figures, Report, read_report, to_json
from edgekit.apps.bench.report.schemas import PUBLISHED, schema_text, write_schemas

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_published_schema_is_that_of_the_code(name: str) -> None:
    stored = (DOCS / "schemas" / f"{name}.schema.json").read_text()
    assert stored == schema_text(name), "run: python -m edgekit.apps.bench.report.schemas docs/schemas"


def test_schemas_are_written_to_the_given_folder(tmp_path: Path) -> None:
    write_schemas(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.schema.json" for name in PUBLISHED}


def test_the_pages_of_performance_are_made_of_the_stored_data() -> None:
    stored = {path: path.read_text() for path in (DOCS / "evidence").glob("performance-*.md")}
    assert stored == performance_pages(DOCS), "run: python -m edgekit.apps.bench.report.performance docs"


@pytest.mark.parametrize("path", stored_reports(DOCS / "data"), ids=lambda path: path.stem)
def test_stored_data_is_complete(path: Path) -> None:
    found = read_report(path)
    assert found.measurements or found.evaluations or found.tables or found.points or found.tasks


@pytest.mark.parametrize(
    ("script", "data", "name"),
    [
        ("quantisation_cost", "quantisation_cost", "quantisation"),
        ("quantisation_figures", "quantisation", "quantisation_losses"),
    ],
    ids=["what it costs", "what it loses"],
)
def test_the_page_of_quantisation_is_made_of_the_stored_data(tmp_path: Path, script: str, data: str, name: str) -> None:
    if script == "quantisation_figures":
        pytest.importorskip("torch")
    stored = (DOCS / f"evidence/{name}.md").read_text()
    page = tmp_path / "page.md"
    page.write_text(stored)
    module = importlib.import_module(f"examples.benchmarks.{script}")
    module.write_page(page, json.loads((DOCS / f"data/{data}.json").read_text()))
    assert page.read_text() == stored, f"run: python -m examples.benchmarks.{script}"


def test_every_stored_report_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert performance_pages(tmp_path) == {}
    figures = Figures(title="Figures", head=("what", "how much"), rows=(("speed", "12.5"),), source="a script")
    for name, report in (
        ("b", Report(title="Second", tables=(figures,))),
        ("a", Report(title="First", measurements=(measured.measurement([100, 104, 108]),))),
    ):
        (tmp_path / "data" / f"{name}.json").write_text(to_json(report))
    first, second = performance_pages(tmp_path).items()
    assert first[0].name == "performance-a.md" and "| speed | 12.5 |" in second[1]
    assert first[1].startswith("# First\n") and "104 ± 3.8%" in first[1] and "[a.json](../data/a.json)" in first[1]
