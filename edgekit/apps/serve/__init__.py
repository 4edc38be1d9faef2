"""A local server over open runtimes, for clients of OpenAI's, Anthropic's and Ollama's APIs: the extra `serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgekit.errors import vendor_errors

if TYPE_CHECKING:
    from edgekit.apps.serve.application import app
    from edgekit.apps.serve.pool import on_demand

__all__ = ["app", "on_demand"]


def __getattr__(name: str) -> Any:
    """Import the public functions on first use, so that the settings work without the packages of the extra."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with vendor_errors("edgekit[serve]"):
        from edgekit.apps.serve.application import app
    from edgekit.apps.serve.pool import on_demand

    return {"app": app, "on_demand": on_demand}[name]
