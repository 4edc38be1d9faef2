"""What is published stays true: the schemas are those of the code, and the page of performance is made of its data."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import measured
import pytest

from edgekit.measure.performance import performance_page, stored_reports
from edgekit.measure.results import Figures, Report, read_report, to_json
from edgekit.measure.schemas import PUBLISHED, schema_text, write_schemas

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_published_schema_is_that_of_the_code(name: str) -> None:
    stored = (DOCS / "schemas" / f"{name}.schema.json").read_text()
    assert stored == schema_text(name), "run: python -m edgekit.measure.schemas docs/schemas"


def test_schemas_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    write_schemas(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.schema.json" for name in PUBLISHED}


def test_the_page_of_performance_is_made_of_the_stored_data() -> None:
    stored = (DOCS / "performance.md").read_text()
    assert stored == performance_page(DOCS), "run: python -m edgekit.measure.performance docs"


@pytest.mark.parametrize("path", stored_reports(DOCS / "data"), ids=lambda path: path.stem)
def test_stored_data_is_whole(path: Path) -> None:
    found = read_report(path)
    assert found.measurements or found.evaluations or found.tables or found.points


@pytest.mark.parametrize(
    ("script", "data"),
    [("quantisation_cost", "quantisation_cost"), ("quantisation_figures", "quantisation")],
    ids=["what it costs", "what it loses"],
)
def test_the_page_of_quantisation_is_made_of_the_stored_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, data: str
) -> None:
    if script == "quantisation_figures":
        pytest.importorskip("torch")
    monkeypatch.syspath_prepend(DOCS.parent / "examples")
    stored = (DOCS / "quantisation.md").read_text()
    page = tmp_path / "page.md"
    page.write_text(stored)
    importlib.import_module(script).write_page(page, json.loads((DOCS / f"data/{data}.json").read_text()))
    assert page.read_text() == stored, f"run: python examples/{script}.py"


def test_a_page_shows_whatever_lies_in_its_data(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert "No run is stored yet" in performance_page(tmp_path)
    figures = Figures(title="Figures", head=("what", "how much"), rows=(("speed", "12.5"),), source="a script")
    for name, report in (
        ("b", Report(title="Second", tables=(figures,))),
        ("a", Report(title="First", measurements=(measured.measurement([100, 104, 108]),))),
    ):
        (tmp_path / "data" / f"{name}.json").write_text(to_json(report))
    page = performance_page(tmp_path)
    assert page.index("## First") < page.index("104 ± 3.8%") < page.index("## Second") < page.index("| speed | 12.5 |")
    assert "[a.json](data/a.json)" in page
