"""Every threat of SECURITY.md names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_threat_has_a_test_that_exists() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")]
    assert rows[0][-1].strip() == "test" and len(rows) > 20
    for row in rows[1:]:
        for named in row[-1].split(","):
            found = re.fullmatch(r"`(?P<file>tests/[\w/]+\.py)::(?P<name>test_\w+)`", named.strip())
            assert found is not None, row
            tree = ast.parse((ROOT / found["file"]).read_text())
            assert found["name"] in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, row
