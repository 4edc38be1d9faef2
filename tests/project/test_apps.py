"""An app imports only what any program could: public names, contracts, `edgekit.testing`, tools, and itself.

A method imports contracts and what its seam gives it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPEN = ("edgekit.contracts", "edgekit.testing", "edgekit.errors", "edgekit.common", "edgekit.commands", "edgekit.route")
SEAMS = ("edgekit.drafters", "edgekit.quant_methods", "edgekit.enginekit.keeping.scorer")

PARTS = [
    (kind, path.parent.name)
    for kind in ("apps", "methods")
    for path in sorted((ROOT / "edgekit" / kind).glob("*/__init__.py"))
]


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    """The module and the name of each import from edgekit."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.partition(".")[0] == "edgekit")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "edgekit":
            yield from ((node.module or "", alias.name) for alias in node.names)


def is_public(module: str, name: str) -> bool:
    """Whether edgekit or another app offers this name."""
    if module == "edgekit" and not name:
        return True
    is_face = module == "edgekit" or (module.startswith("edgekit.apps.") and module.count(".") == 2)
    return is_face and name in getattr(import_module(module), "__all__", ())


def private_modules(kind: str, part: str) -> set[str]:
    """The modules of edgekit that an app or method imports though they are neither public nor its own."""
    allowed = (*OPEN, f"edgekit.{kind}.{part}", *(SEAMS if kind == "methods" else ()))
    return {
        module
        for path in (ROOT / "edgekit" / kind / part).rglob("*.py")
        for module, name in imports_of(path)
        if not is_public(module, name) and not any(f"{module}.{name}.".startswith(f"{each}.") for each in allowed)
    }


@pytest.mark.parametrize(("kind", "part"), PARTS, ids=[part for _, part in PARTS])
def test_no_private_module_is_imported(kind: str, part: str) -> None:
    assert sorted(private_modules(kind, part)) == []


def test_the_core_imports_no_app_and_no_method() -> None:
    paths = [path for part in ("edgekit", "targets") for path in (ROOT / part).rglob("*.py")]
    above = (ROOT / "edgekit/apps", ROOT / "edgekit/methods")
    core = [path for path in paths if not any(path.is_relative_to(folder) for folder in above)]
    found = {module for path in core for module, _ in imports_of(path)}
    assert not [module for module in found if module.startswith(("edgekit.apps", "edgekit.methods"))]


def test_every_public_name_is_there() -> None:
    for module in ("edgekit", "edgekit.apps.bench", "edgekit.commands", "edgekit.drafters", "edgekit.quant_methods"):
        face = import_module(module)
        assert all(getattr(face, name) is not None for name in face.__all__)
        for name in face.__all__ if hasattr(face, "__path__") else ():
            assert not (Path(face.__path__[0]) / f"{name}.py").exists(), f"{name}: its module hides the name"
