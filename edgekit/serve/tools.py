"""Tools of a request: their descriptions for the template, and a schema where the model must call one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field, JsonValue

from edgekit.serve.fields import ApiFields, no_choice
from edgekit.serve.problems import invalid

if TYPE_CHECKING:
    from edgekit.runtime.text_assembler import Piece

MOST_TOOLS = 128
_MAX_CHARACTERS = 256 << 10


class FunctionTool(ApiFields):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None

    def described(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function = {"name": self.name, "description": self.description or "", "parameters": self.parameters or _NOTHING}
        return {"type": "function", "function": function}


_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


class ToolPlan(NamedTuple):
    """The tools that the template describes, and the call that the answer must be."""

    described: list[dict[str, Any]] | None  # None: the answer calls nothing
    schema: dict[str, Any] | None = None  # of the call that the answer must be
    most_calls: int | None = None

    @property
    def is_forced(self) -> bool:
        return self.schema is not None


class CallPart(NamedTuple):
    """A part of a call: its place among the calls, its name where it begins here, and more of its arguments."""

    place: int
    name: str | None
    arguments: str


class CallParts:
    """The calls of one answer while they are written. Those after the first `most` are left out."""

    def __init__(self, most: int | None) -> None:
        self._most, self._begun, self._completed = most, set[int](), 0

    def of(self, piece: Piece) -> list[CallPart]:
        """The parts that a piece adds."""
        parts = []
        for delta in piece.tool_call_deltas:
            if self._most is None or delta.index < self._most:
                parts.append(CallPart(delta.index, None if delta.index in self._begun else delta.name, delta.arguments))
                self._begun.add(delta.index)
        self._completed += len(piece.tool_calls)
        return parts

    def is_enough(self, piece: Piece) -> bool:
        """True where the answer can end with this piece: it has all calls that it may have."""
        return self._most is not None and self._completed >= self._most and piece.finish_reason is None


def whole_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call that was written to its end; None for one that was cut short."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def plan_tools(tools: Sequence[FunctionTool], choice: str, *, parallel: bool = True) -> ToolPlan:
    """`choice` is `none`, `auto`, `required`, or the name of a function behind `function:`."""
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
    """The schema of a call of one of `tools`, as an object with its name and its arguments."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    "arguments": _moved(tool.parameters or _NOTHING, f"#/anyOf/{place}/properties/arguments"),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for place, tool in enumerate(tools)
        ]
    }


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references are relative to its new place."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, root) for key, value in schema.items()}
    if isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#"):
        moved["$ref"] = root + schema["$ref"][1:]
    return moved
