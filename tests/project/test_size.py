"""The size of the house, room by room. The budgets may only fall; docs/architecture.md has the same numbers."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import click
import pytest

from edgekit.artifact.export import ExportOptions
from edgekit.cli import command as root
from edgekit.planner.request import PlanRequest
from edgekit.runtime.generation.sampling import Sampling
from edgekit.runtime.generation.stopping import Stopping
from edgekit.runtime.open_options import OpenOptions

ROOT = Path(__file__).parents[2]
APPS = {"apps", "methods"}
CODE = [path for part in ("edgekit", "targets") for path in sorted((ROOT / part).rglob("*.py"))]


@cache
def trees() -> list[ast.Module]:
    return [ast.parse(path.read_text()) for path in CODE]


def lines_of(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def room_of(path: Path) -> str:
    part, *below = path.relative_to(ROOT).parts
    deep = 2 if below[0] in APPS else 1
    return "/".join((part, *below[: min(deep, len(below) - 1)]))


def is_core(path: Path) -> bool:
    return path.relative_to(ROOT).parts[1] not in APPS


def functions() -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for tree in trees() for node in ast.walk(tree) if isinstance(node, kinds)]


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def options(group: click.Command, context: click.Context) -> int:
    count = sum(isinstance(each, click.Option) for each in group.params)
    if isinstance(group, click.Group):
        for name in group.list_commands(context):
            child = group.get_command(context, name)
            assert child is not None
            count += options(child, click.Context(child, context, name))
    return count


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


BUDGETS: dict[str, tuple[int, Callable[[], int]]] = {
    "lines of Python in edgekit and targets": (71_222, lambda: lines_of(CODE)),
    "of it the core, without apps and methods": (53_783, lambda: lines_of([path for path in CODE if is_core(path)])),
    "functions with more than 7 parameters": (11, lambda: sum(parameters(each) > 7 for each in functions())),
    "lines of the longest function": (77, lambda: max(map(length, functions()))),
    "options of all commands": (284, lambda: options(root, click.Context(root))),
    "`# fmt: skip` in edgekit and targets": (
        81,
        lambda: sum(len(re.findall(r"# fmt: skip$", path.read_text(), re.M)) for path in CODE),
    ),
    "files of less than 40 lines": (47, lambda: sum(0 < lines_of([path]) < 40 for path in CODE)),
    "lines of tests": (47_634, lambda: lines_of(list((ROOT / "tests").rglob("*.py")))),
    "files of documentation": (
        54,
        lambda: sum(
            path.suffix in (".md", ".ipynb", ".svg", ".json", ".jsonl", ".py") for path in (ROOT / "docs").rglob("*")
        ),
    ),
    "benchmark scripts": (20, lambda: len(list((ROOT / "examples/benchmarks").glob("[a-z]*.py")))),
}


# Options that other classes declare again, by the reason. They may only become fewer.
AGAIN = {
    "plans have them for what is built": "context gpu_layers keep kv_bits memory sequences sinks target window draft",
    "servers of other projects have them": "adapters context draft drafter max_first_token min_tokens_per_second recipe"
    " sequences",
    "quantize makes integers without a plan": "bits_per_weight threads recipe",
    "a command loads or serves adapters, and keeps prefixes in a file": "adapters adapters prefixes prefixes",
    "a server has one limit for all models": "memory",
    "devices are shown and filtered by them": "entitlements os_version target",
    "benchmarks have their own defaults, and runners without edgekit": "window exact",
    "bytes of disk, and a database of measurements": "keep keep store",
}


def test_an_option_is_declared_once() -> None:
    options = {
        name for model in (OpenOptions, Sampling, Stopping, ExportOptions, PlanRequest) for name in model.model_fields
    }
    classes = [node for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    declared = Counter(
        field.target.id
        for each in classes
        for field in each.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and "description=" in ast.unparse(field)
    )
    again = Counter(name for names in AGAIN.values() for name in names.split())
    assert {name: count - 1 for name, count in declared.items() if name in options and count > 1} == again


@pytest.mark.parametrize("what", BUDGETS)
def test_a_budget_is_kept(what: str) -> None:
    most, count = BUDGETS[what]
    found = count()
    assert found <= most, f"{what}: {found:,}, and the budget is {most:,}: remove a concept, do not make lines denser"
    assert f"| {what} | {most:,} |" in (ROOT / "docs/architecture.md").read_text()


def test_the_rooms(capsys: pytest.CaptureFixture[str]) -> None:
    rooms = Counter[str]()
    for path in CODE:
        rooms[room_of(path)] += lines_of([path])
    with capsys.disabled():
        click.echo(f"\nlines of Python: {', '.join(f'{room} {count:,}' for room, count in rooms.most_common())}")
    assert rooms.total() == lines_of(CODE)
