"""The core has floors: a folder imports only from folders below it, and class names have one meaning."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kept import HEAVY_MODULES

ROOT = Path(__file__).parents[2]

# From the bottom up. Folders of one floor do not import each other.
FLOORS = (
    ("errors",),
    ("common",),
    ("formats",),
    ("model",),
    ("contracts",),
    ("plugins",),
    ("quant", "enginekit"),
    ("device",),
    ("planner",),
    ("artifact",),
    ("runtime",),
    ("calibrating",),
    ("api",),
    ("route",),
    ("testing", "doctor"),
    ("cli",),
    ("commands", "drafters", "quant_methods"),
    ("apps", "methods"),
    ("__main__", "optimum"),  # optimum: a command registered with optimum's own command line
)
FLOOR_OF = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}
SEEN_BY_TARGETS = {"errors", "common", "formats", "model", "contracts", "quant", "enginekit"}

PURE = {"errors", "formats", "model", "contracts", "enginekit", "planner"}
PURE_BUT_FOR_DOWNLOADS = "edgekit.model.source"
OUTSIDE = {"socket", "time", "requests", "urllib", "subprocess", "huggingface_hub"}
WEB = {"starlette", "uvicorn", "h11"}  # of the extra `serve`, for its app only
MOST_LINES = 600


class Import(NamedTuple):
    """One imported name, with its line."""

    line: int
    name: str  # `package.module`, or `package.module.name`


def find_modules() -> dict[str, Path]:
    """Every module of the project by its dotted name."""
    found = {}
    for base, start in ((ROOT, ROOT / "edgekit"), (ROOT / "targets", ROOT / "targets")):
        for path in sorted(start.rglob("*.py")):
            words = path.relative_to(base).with_suffix("").parts
            found[".".join(words[:-1] if words[-1] == "__init__" else words)] = path
    return found


MODULES = find_modules()
FACE = "edgekit"  # edgekit/__init__.py, which loads everything else when it is asked for
EACH = sorted(MODULES.keys() - {FACE})


def folder_of(module: str) -> str:
    """The folder of edgekit that a module belongs to, or the package of its target."""
    words = module.split(".")
    return words[1] if words[0] == "edgekit" and len(words) > 1 else words[0]


@cache
def imports_of(path: Path) -> list[Import]:
    """Every import of a file, those inside functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [Import(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found += [Import(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def module_named(name: str) -> str | None:
    """The module of the project that an import loads."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name if name in MODULES else None


def own_imports(module: str) -> Iterator[tuple[Import, str]]:
    """The imports of a module that load another module of the project."""
    for each in imports_of(MODULES[module]):
        other = module_named(each.name)
        if other not in (None, FACE, module):
            assert other is not None
            yield each, other


def test_modules_import_only_from_lower_floors() -> None:
    for module in EACH:
        folder = folder_of(module)
        for each, other in own_imports(module):
            below = folder_of(other)
            place = f"{MODULES[module]}:{each.line}"
            if folder == below:
                continue
            assert not below.startswith("edgekit_"), f"{place}: nobody imports a target by name"
            if folder.startswith("edgekit_"):
                assert below in SEEN_BY_TARGETS, f"{place}: a target imports {below}"
            else:
                assert FLOOR_OF[below] < FLOOR_OF[folder], f"{place}: {folder} imports {below}"


def test_pure_folders_touch_no_network_clock_or_vendor_library() -> None:
    for module in EACH:
        if folder_of(module) in PURE and module != PURE_BUT_FOR_DOWNLOADS:
            found = {(each.line, each.name.partition(".")[0]) for each in imports_of(MODULES[module])}
            assert not [(module, line, name) for line, name in found if name in OUTSIDE | HEAVY_MODULES]


def test_only_the_server_imports_a_web_framework() -> None:
    for module in EACH:
        found = {each.name.partition(".")[0] for each in imports_of(MODULES[module])} & WEB
        assert not found or module.startswith("edgekit.apps.serve."), f"{module} imports {found}"


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other."""
    reached: dict[str, set[str]] = {}
    for start in arrows:
        seen, waiting = set[str](), [start]
        while waiting:
            for other in arrows.get(waiting.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
        reached[start] = seen
    groups = {tuple(sorted(b for b in seen if a in reached.get(b, ()))) for a, seen in reached.items() if a in seen}
    return [list(group) for group in sorted(groups)]


def test_no_import_cycle_between_modules() -> None:
    assert circles({module: {other for _, other in own_imports(module)} for module in MODULES}) == []


def test_no_import_cycle_between_subfolders() -> None:
    def place(module: str) -> str:
        package = ".".join(module.split(".")[: 4 if module.startswith("edgekit.apps") else 3])
        return package if package in MODULES and MODULES[package].name == "__init__.py" else module

    arrows: dict[str, set[str]] = {}
    for module in MODULES:
        arrows.setdefault(place(module), set()).update(
            place(other) for _, other in own_imports(module) if place(other) != place(module)
        )
    assert circles(arrows) == []


def test_no_module_is_too_long() -> None:
    long = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name: lines for name, lines in long.items() if lines > MOST_LINES} == {}


def named_types(body: list[ast.stmt]) -> Iterator[tuple[str, str | None]]:
    """Classes and aliases of types at the top of a module; of an alias, what it stands for."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node.name, None
        elif isinstance(node, ast.If):
            yield from named_types(node.body)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            meaning = ast.unparse(node.value)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                is_type = isinstance(target, ast.Name) and target.id[0].isupper() and not target.id.isupper()
                if isinstance(target, ast.Name) and is_type and not meaning.startswith("TypeVar("):
                    yield target.id, meaning


def ambiguous(sources: dict[str, str]) -> dict[str, list[str]]:
    """Names with more than one meaning, and the files that give them. Aliases of the same type mean the same."""
    meanings: dict[str, dict[str, str]] = defaultdict(dict)
    for place, source in sources.items():
        for name, meaning in named_types(ast.parse(source).body):
            meanings[name].setdefault(meaning or place, place)
    return {name: sorted(found.values()) for name, found in meanings.items() if len(found) > 1}


def test_every_class_name_has_one_meaning() -> None:
    paths = [path for folder in ("edgekit", "targets") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert ambiguous({str(path.relative_to(ROOT)): path.read_text() for path in paths}) == {}
