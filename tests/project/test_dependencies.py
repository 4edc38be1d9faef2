"""Every package that the code imports is a declared dependency: of the core, or of an extra."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
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


def _declared() -> dict[str, set[str]]:
    """The packages of the core, as `core`, and of every extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = {"core": project["dependencies"], **project["optional-dependencies"]}
    return {name: {canonicalize_name(re.split(r"[^\w.-]", line)[0]) for line in part} for name, part in lines.items()}


def _extras_for(path: Path, extras: Iterable[str]) -> set[str]:
    """The extras of which one must bring what a file imports: a target's own, or any that users ask for."""
    if path.parts[0] == "targets" and path.parts[1] != "edgekit_native":
        name = path.parts[1].removeprefix("edgekit_")
        return {name, *{"executorch": ["coreml"]}.get(name, [])}
    return set(extras) - {"dev", "docs"} | ({"dev"} if path.name == "pytest_plugin.py" else set())


def test_every_imported_package_is_declared_where_it_is_needed() -> None:
    declared, installed = _declared(), importlib.metadata.packages_distributions()
    imported = list(_imported())
    assert len({top for top, _ in imported}) > 20
    missing = {
        (top, str(path))
        for top, path in imported
        if not set().union(*(declared.get(name, set()) for name in {"core", *_extras_for(path, declared)}))
        & {canonicalize_name(name) for name in installed.get(top, [top])}
    }
    assert not missing


def test_both_extras_of_the_onnx_target_bring_the_same_but_for_the_runtime() -> None:
    declared = _declared()
    assert declared["onnx"] - {"onnxruntime"} == declared["cuda"] - {"onnxruntime-gpu"}
