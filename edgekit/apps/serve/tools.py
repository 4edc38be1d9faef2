"""The tools of a request: their descriptions for the template, and a schema if the model must call one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field, JsonValue

from edgekit.apps.serve.fields import ApiFields, no_choice
from edgekit.apps.serve.problems import invalid

if TYPE_CHECKING:
    from edgekit import Piece

MOST_TOOLS = 128
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
_MAX_CHARACTERS = 256 << 10


class FunctionTool(ApiFields):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None

    def described(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        function = {"name": self.name, "description": self.description or "", "parameters": self.parameters or _NOTHING}
        return {"type": "function", "function": function}


_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


class ToolPlan(NamedTuple):
    """The tools for the template, and the schema of the call if the answer must be one."""

    described: list[dict[str, Any]] | None  # None: no tools
    schema: dict[str, Any] | None = None  # set if the answer must be a call
    most_calls: int | None = None

    @property
    def is_forced(self) -> bool:
        return self.schema is not None


class CallPart(NamedTuple):
    """A part of a call: the index of the call, its name in its first part, and more of its arguments."""

    place: int
    name: str | None
    arguments: str


class CallParts:
    """Follows the calls of one answer while they are written. Calls after the first `most` are dropped."""

    def __init__(self, most: int | None) -> None:
        self._most, self._begun, self._completed = most, set[int](), 0

    def of(self, piece: Piece) -> list[CallPart]:
        """Return the parts that a piece adds."""
        parts = []
        for delta in piece.tool_call_deltas:
            if self._most is None or delta.index < self._most:
                parts.append(CallPart(delta.index, None if delta.index in self._begun else delta.name, delta.arguments))
                self._begun.add(delta.index)
        self._completed += len(piece.tool_calls)
        return parts

    def is_enough(self, piece: Piece) -> bool:
        """Return True if the answer can end with this piece, because it has as many calls as allowed."""
        return self._most is not None and self._completed >= self._most and piece.finish_reason is None


def whole_arguments(text: str) -> dict[str, Any] | None:
    """Parse the arguments of a call; None if the call was cut short."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def plan_tools(tools: Sequence[FunctionTool], choice: str, *, parallel: bool = True) -> ToolPlan:
    """Check the tools and plan the answer. `choice`: `none`, `auto`, `required` or `function:NAME`."""
    names = [tool.name for tool in tools]
    if len(tools) > MOST_TOOLS or len(set(names)) < len(names):
        raise invalid(f"tools: at most {MOST_TOOLS}, each with a name of its own", "tools")
    described = [tool.described() for tool in tools]
    if len(json.dumps(described)) > _MAX_CHARACTERS:
        raise invalid(f"tools: more than {_MAX_CHARACTERS:,} characters together", "tools")
    if choice == "none" or (not tools and choice == "auto"):
        return ToolPlan(None)
    if choice == "auto":
        return ToolPlan(described, most_calls=None if parallel else 1)
    if choice == "required":
        chosen = list(tools)
        if not chosen:
            raise invalid("tool_choice: there are no tools; describe one", "tool_choice")
    else:
        name = choice.removeprefix("function:")
        chosen = [tool for tool in tools if tool.name == name]
        if not chosen:
            raise no_choice(name, names)
    return ToolPlan(described, call_schema(chosen), 1)


def call_schema(tools: Sequence[FunctionTool]) -> dict[str, Any]:
    """Return the schema of a call of one of `tools`: an object with `name` and `arguments`."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    "arguments": _moved(tool.parameters or _NOTHING, f"#/anyOf/{index}/properties/arguments"),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for index, tool in enumerate(tools)
        ]
    }


def _moved(schema: Any, root: str) -> Any:
    """Return the schema with references adjusted to its new place, `root`."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, root) for key, value in schema.items()}
    if isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#"):
        moved["$ref"] = root + schema["$ref"][1:]
    return moved
