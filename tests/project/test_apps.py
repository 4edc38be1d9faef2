"""An app imports only what any program could: public names, contracts, `edgekit.testing`, tools, and itself.

`MOST_PRIVATE` counts the modules that each app imports beyond that. The numbers may only fall.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgekit

ROOT = Path(__file__).parents[2]
APPS = sorted(path.name for path in (ROOT / "edgekit/apps").iterdir() if path.is_dir() and path.name != "__pycache__")
OPEN = ("edgekit.contracts", "edgekit.testing", "edgekit.errors", "edgekit.common", "edgekit.commands", "edgekit.route")
MOST_PRIVATE = {"bench": 14, "handover": 24}


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    """The module and the name of each import from edgekit."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.partition(".")[0] == "edgekit")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "edgekit":
            yield from ((node.module or "", alias.name) for alias in node.names)


def private_modules(app: str) -> set[str]:
    """The modules of edgekit that `app` imports though they are neither public nor its own."""
    found = set()
    for path in (ROOT / "edgekit/apps" / app).rglob("*.py"):
        for module, name in imports_of(path):
            is_public = module == "edgekit" and (not name or name in edgekit.__all__)
            own = f"edgekit.apps.{app}"
            is_open = any(f"{module}.".startswith(f"{each}.") for each in (*OPEN, own))
            is_face = module.count(".") == 2 and module.startswith("edgekit.apps.")  # what another app makes public
            if not (is_public or is_open or is_face or f"{module}.{name}" in OPEN):
                found.add(f"{module}.{name}" if module == "edgekit" else module)
    return found


@pytest.mark.parametrize("app", APPS)
def test_an_app_imports_no_more_private_modules(app: str) -> None:
    found = private_modules(app)
    assert len(found) == MOST_PRIVATE.get(app, 0), f"{app} imports {sorted(found)}"


def test_the_core_imports_no_app() -> None:
    paths = [path for part in ("edgekit", "targets") for path in (ROOT / part).rglob("*.py")]
    core = [path for path in paths if not path.is_relative_to(ROOT / "edgekit/apps")]
    found = [
        (str(path), module) for path in core for module, _ in imports_of(path) if module.startswith("edgekit.apps")
    ]
    assert found == []
