"""Published schemas match the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgekit.apps.bench.report.schemas import PUBLISHED, schema_text, write_schemas

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_published_schema_is_that_of_the_code(name: str) -> None:
    stored = (DOCS / "schemas" / f"{name}.schema.json").read_text()
    assert stored == schema_text(name), "run: python -m edgekit.apps.bench.report.schemas docs/schemas"


def test_schemas_are_written_to_the_given_folder(tmp_path: Path) -> None:
    write_schemas(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.schema.json" for name in PUBLISHED}
