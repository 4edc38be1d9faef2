"""edgekit: one model spec in, the right quantised artifact for every device out, one runtime to run them all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgekit.errors import EdgekitError

if TYPE_CHECKING:
    from edgekit.runtime.asynchronous import AsyncRuntime
    from edgekit.runtime.opening import open_runtime as open  # noqa: A004 - edgekit.open is the door
    from edgekit.runtime.runtime import Runtime
    from edgekit.runtime.sequence import Piece
    from edgekit.runtime.stream import Answer, Stream

__version__ = "0.1.0"
__all__ = ["Answer", "AsyncRuntime", "EdgekitError", "Piece", "Runtime", "Stream", "__version__", "open"]

# Loaded when first asked for, so that `import edgekit` stays quick.
_LAZY = {
    "Answer": ("edgekit.runtime.stream", "Answer"),
    "AsyncRuntime": ("edgekit.runtime.asynchronous", "AsyncRuntime"),
    "Piece": ("edgekit.runtime.sequence", "Piece"),
    "Runtime": ("edgekit.runtime.runtime", "Runtime"),
    "Stream": ("edgekit.runtime.stream", "Stream"),
    "open": ("edgekit.runtime.opening", "open_runtime"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _LAZY[name]
    globals()[name] = value = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
