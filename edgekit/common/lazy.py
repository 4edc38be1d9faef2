"""Names of a package that are imported on first use, so that importing the package is quick."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any


def lazy(
    package: str, modules: Mapping[str, Sequence[str]], renamed: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package` that looks names up in its `modules`; `renamed`: their names there."""
    module_of = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name], package), renamed.get(name, name))
        setattr(sys.modules[package], name, value)
        return value

    return get
