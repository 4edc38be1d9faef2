"""The package: what it depends on, imports and makes public, and that each planted fault replaces one line."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from kept import HEAVY_MODULES
from packaging.utils import canonicalize_name
from planted_lines import FAULTS

import edgekit
from edgekit import api

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


_PROBE = """
import json, sys, time
start = time.process_time()
{code}
spent = time.process_time() - start
print(json.dumps([spent, sorted({{name.partition('.')[0] for name in sys.modules}})]))
"""


def probe(code: str, cwd: Path) -> tuple[float, set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", _PROBE.format(code=code)], capture_output=True, text=True, check=True, cwd=cwd
    )
    spent, modules = json.loads(done.stdout.splitlines()[-1])
    return spent, set(modules)


def test_importing_edgekit_is_quick_and_loads_nothing_heavy(tmp_path: Path) -> None:
    runs = [probe("import edgekit", tmp_path) for _ in range(3)]
    assert not runs[0][1] & (HEAVY_MODULES | {"numpy", "rich", "click"})
    assert min(spent for spent, _ in runs) < 0.15


@pytest.mark.parametrize("name", ["onnx", "mlx", "llamacpp", "executorch"])
def test_loading_a_target_loads_no_vendor_library(name: str, tmp_path: Path) -> None:
    _, modules = probe(f"from edgekit.plugins import load_target; load_target({name!r}).missing()", tmp_path)
    assert not modules & HEAVY_MODULES


def test_planning_loads_no_vendor_library(tmp_path: Path) -> None:
    code = "from edgekit.planner.make import make_plans; make_plans('demo', ['pixel-9', 'macbook-m4-16gb'])"
    _, modules = probe(code, tmp_path)
    assert not modules & HEAVY_MODULES


def test_the_public_names_of_edgekit() -> None:
    assert edgekit.__all__ == (Path(__file__).parents[1] / "data/public_names.txt").read_text().split()


def test_every_public_name_is_there_and_has_a_docstring() -> None:
    for name in edgekit.__all__:
        value = getattr(edgekit, name)
        assert value is not None
        assert name == "__version__" or inspect.getdoc(value), name
    assert set(edgekit.__all__) <= set(dir(edgekit))


def test_every_public_name_is_in_the_reference() -> None:
    page = (Path(__file__).parents[2] / "docs/reference.md").read_text()
    for name in set(edgekit.__all__) - {"__version__", "EdgekitError"}:
        value = getattr(edgekit, name)
        assert f"::: {value.__module__}.{value.__qualname__}\n" in page, name


def test_functions_have_an_example_in_their_docstring() -> None:
    runtime = edgekit.Runtime
    methods = (
        runtime.generate,
        runtime.chat,
        runtime.stream,
        runtime.submit,
        runtime.score,
        runtime.embed,
        runtime.pin,
    )
    for function in (edgekit.plan, edgekit.export, edgekit.quantize, edgekit.AsyncRuntime.open, *methods):
        assert ">>> " in (function.__doc__ or "")


def test_the_other_keywords_are_documented() -> None:
    for function in (api.plan, api.export, api.quantize):
        for name in inspect.signature(function).parameters:
            assert name in (function.__doc__ or ""), f"{function.__name__} does not document {name}"


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert edgekit.__version__ == version("edgekit")


def test_every_fault_replaces_one_line() -> None:
    assert [fault for fault in FAULTS if (ROOT / fault.file).read_text().count(fault.right) != 1] == []
    assert all((ROOT / place).exists() for fault in FAULTS for place in fault.tests.split())
