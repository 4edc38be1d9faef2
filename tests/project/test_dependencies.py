"""Every package that the code imports is a declared dependency: of the core, or of an extra."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
CODE = [path for folder in ("edgekit", "targets") for path in sorted((ROOT / folder).rglob("*.py"))]


def _imported() -> Iterator[tuple[str, Path]]:
    """Yield every imported top-level package that is neither Python's nor this project's."""
    ours = {"edgekit", *(path.name for path in (ROOT / "targets").iterdir())}
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for top in {name.partition(".")[0] for name in names}:
                if top not in ours and top not in sys.stdlib_module_names:
                    yield top, path.relative_to(ROOT)


def test_every_imported_package_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = {canonicalize_name(re.split(r"[^\w.-]", line)[0]) for line in lines}
    installed = importlib.metadata.packages_distributions()
    imported = list(_imported())
    assert len({top for top, _ in imported}) > 20
    missing = {
        (top, str(path))
        for top, path in imported
        if not declared & {canonicalize_name(name) for name in installed.get(top, [top])}
    }
    assert not missing
