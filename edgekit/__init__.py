"""edgekit: one model spec in, the right quantised artifact for every device out, one runtime to run them all.

`__all__` is the public interface; each name is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgekit.errors import EdgekitError

if TYPE_CHECKING:
    from edgekit.api import export, plan, quantize
    from edgekit.artifact.artifact import Artifact
    from edgekit.contracts.device import DeviceProfile
    from edgekit.contracts.neutral import NeutralWeights
    from edgekit.contracts.plan import Plan
    from edgekit.contracts.recipe import Recipe
    from edgekit.device.load import load_profile
    from edgekit.model.spec import ModelSpec
    from edgekit.runtime.async_runtime import AsyncRuntime, AsyncStream
    from edgekit.runtime.generation.tool_call_deltas import ToolCallDelta
    from edgekit.runtime.generation.tool_call_formats import ToolCall
    from edgekit.runtime.generation.tool_calls import parse_tool_calls
    from edgekit.runtime.open import open_runtime as open  # noqa: A004 - edgekit.open is the door
    from edgekit.runtime.options import Options
    from edgekit.runtime.runtime import Runtime
    from edgekit.runtime.stream import Answer, Stream
    from edgekit.runtime.text_assembler import Piece

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "Artifact",
    "AsyncRuntime",
    "AsyncStream",
    "DeviceProfile",
    "EdgekitError",
    "ModelSpec",
    "NeutralWeights",
    "Options",
    "Piece",
    "Plan",
    "Recipe",
    "Runtime",
    "Stream",
    "ToolCall",
    "ToolCallDelta",
    "__version__",
    "export",
    "load_profile",
    "open",
    "parse_tool_calls",
    "plan",
    "quantize",
]

_LAZY = {
    "Answer": ("edgekit.runtime.stream", "Answer"),
    "Artifact": ("edgekit.artifact.artifact", "Artifact"),
    "AsyncRuntime": ("edgekit.runtime.async_runtime", "AsyncRuntime"),
    "AsyncStream": ("edgekit.runtime.async_runtime", "AsyncStream"),
    "DeviceProfile": ("edgekit.contracts.device", "DeviceProfile"),
    "ModelSpec": ("edgekit.model.spec", "ModelSpec"),
    "NeutralWeights": ("edgekit.contracts.neutral", "NeutralWeights"),
    "Options": ("edgekit.runtime.options", "Options"),
    "Piece": ("edgekit.runtime.text_assembler", "Piece"),
    "Plan": ("edgekit.contracts.plan", "Plan"),
    "Recipe": ("edgekit.contracts.recipe", "Recipe"),
    "Runtime": ("edgekit.runtime.runtime", "Runtime"),
    "Stream": ("edgekit.runtime.stream", "Stream"),
    "ToolCall": ("edgekit.runtime.generation.tool_calls", "ToolCall"),
    "ToolCallDelta": ("edgekit.runtime.generation.tool_call_deltas", "ToolCallDelta"),
    "export": ("edgekit.api", "export"),
    "load_profile": ("edgekit.device.load", "load_profile"),
    "open": ("edgekit.runtime.open", "open_runtime"),
    "parse_tool_calls": ("edgekit.runtime.generation.tool_calls", "parse_tool_calls"),
    "plan": ("edgekit.api", "plan"),
    "quantize": ("edgekit.api", "quantize"),
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
