"""One class name has one meaning in the whole tree."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


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


def test_names_with_two_meanings_are_found() -> None:
    one, two = "class Part: ...\nFloats = NDArray[np.float32]", "class Part: ...\nFloats = NDArray[np.float32]"
    assert ambiguous({"one": one, "two": two}) == {"Part": ["one", "two"]}


def test_every_class_name_has_one_meaning() -> None:
    paths = [path for folder in ("edgekit", "targets") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert ambiguous({str(path.relative_to(ROOT)): path.read_text() for path in paths}) == {}
