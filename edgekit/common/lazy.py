"""Names of a module that are imported on first use, so that importing the module is quick."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy(module: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """Return a `__getattr__` for a module, and its public names, which the stub next to its file lists once.

    They are what the stub imports `as` itself, and what it sets, as in `open = open_runtime`. Type checkers and editors
    read the same stub.
    """
    homes: dict[str, str] = {}
    public: dict[str, str] = {}
    for node in ast.parse(Path(file).with_suffix(".pyi").read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            homes |= {alias.name: str(node.module) for alias in node.names}
            public |= {alias.name: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.Assign):
            public[ast.unparse(node.targets[0])] = ast.unparse(node.value)

    def get(name: str) -> Any:
        if name not in public:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(import_module(homes[public[name]]), public[name])
        setattr(sys.modules[module], name, value)
        return value

    return get, sorted(public)
