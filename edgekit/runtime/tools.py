"""Tool calls in an answer, as structured objects, from the formats that models are trained on. The raw text is kept.

Pure text: it knows nothing of models; what is no call of an offered tool stays text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from edgekit.frozen import Frozen

MAX_CALLS = 128
_DECODER = json.JSONDecoder(parse_constant=lambda name: None)


class ToolCall(Frozen):
    """A function that the model wants to be called."""

    name: str
    arguments: dict[str, Any]


class Parsed(NamedTuple):
    """An answer taken apart: what is said, and what is to be called."""

    content: str
    calls: tuple[ToolCall, ...]


class _Found(NamedTuple):
    start: int
    stop: int
    calls: list[ToolCall]


def tool_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The names of offered tools, described as `{"type": "function", "function": {...}}` or as the function alone."""
    described = [tool.get("function", tool) for tool in tools]
    return frozenset(str(one["name"]) for one in described if isinstance(one, Mapping) and "name" in one)


def parse_tool_calls(text: str, names: Collection[str]) -> Parsed:
    """The calls of tools named `names`, and the text without them. Calls that are cut short or unknown stay text."""
    for form in (_hermes, _mistral, _phi, _python_tag, _code_blocks, _bare):
        found = [one for one in form(text, names) if one.calls]
        if found:
            content, place = "", 0
            for one in found:
                content += text[place : one.start]
                place = one.stop
            calls = tuple(call for one in found for call in one.calls)[:MAX_CALLS]
            return Parsed((content + text[place:]).strip(), calls)
    return Parsed(text, ())


def _hermes(text: str, names: Collection[str]) -> Iterator[_Found]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen, SmolLM)."""
    for match in re.finditer(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL):
        yield _Found(match.start(), match.end(), _calls_in(match[1], names))


def _mistral(text: str, names: Collection[str]) -> Iterator[_Found]:
    """`[TOOL_CALLS][{...}]`, and the newer `[TOOL_CALLS]name[ARGS]{...}`."""
    for match in re.finditer(r"\[TOOL_CALLS\]((?:(?!\[TOOL_CALLS\]).)*)", text, re.DOTALL):
        named = re.match(r"\s*([\w.-]{1,128})(?:\[CALL_ID\][\w-]*)?\[ARGS\](.*)", match[1], re.DOTALL)
        arguments = _first_json(named[2]) if named else None
        if named and named[1] in names and isinstance(arguments, dict):
            yield _Found(match.start(), match.end(), [ToolCall(name=named[1], arguments=arguments)])
        elif not named:
            yield _Found(match.start(), match.end(), _calls_in(match[1], names))


def _phi(text: str, names: Collection[str]) -> Iterator[_Found]:
    """`<|tool_call|>[{...}]<|/tool_call|>` (Phi-4-mini), also with `functools[...]`."""
    for match in re.finditer(r"(?:<\|tool_call\|>|functools(?=\[))(.*?)(?:<\|/tool_call\|>|\Z)", text, re.DOTALL):
        yield _Found(match.start(), match.end(), _calls_in(match[1], names))


def _python_tag(text: str, names: Collection[str]) -> Iterator[_Found]:
    """`<|python_tag|>` before JSON or before `tool.call(key=value)` (Llama 3.x)."""
    for match in re.finditer(r"<\|python_tag\|>(.*?)(?:<\|eom_id\|>|<\|eot_id\|>|\Z)", text, re.DOTALL):
        calls = _calls_in(match[1], names) or _python_calls(match[1], names)
        yield _Found(match.start(), match.end(), calls)


def _code_blocks(text: str, names: Collection[str]) -> Iterator[_Found]:
    """A fenced block that holds nothing but calls, as JSON or as Python (Gemma)."""
    for match in re.finditer(r"```(?:tool_code|tool_call|json|python)\s*\n(.*?)\n?```", text, re.DOTALL):
        yield _Found(match.start(), match.end(), _calls_in(match[1], names) or _python_calls(match[1], names))


def _bare(text: str, names: Collection[str]) -> Iterator[_Found]:
    """An answer that is nothing but JSON calls (Llama 3.x), or a list of Python calls (Llama 3.2, Gemma)."""
    if text.strip()[:1] in ("{", "["):
        yield _Found(0, len(text), _calls_in(text, names) or _python_calls(text, names))


def _calls_in(text: str, names: Collection[str]) -> list[ToolCall]:
    """All of `text` read as one JSON call, a list of them, or several after each other; else nothing."""
    calls: list[ToolCall] = []
    rest = text.strip()
    while rest:
        try:
            value, stop = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        for one in value if isinstance(value, list) else [value]:
            call = _call_of(one, names)
            if call is None:
                return []
            calls.append(call)
        rest = rest[stop:].lstrip(" \t\r\n;,")
    return calls


def _call_of(value: Any, names: Collection[str]) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    value = value["function"] if isinstance(value.get("function"), dict) else value
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as JSON inside a string
        arguments = _first_json(arguments)
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return ToolCall(name=name, arguments=arguments)


def _first_json(text: str) -> Any:
    try:
        return _DECODER.raw_decode(text.strip())[0]
    except (ValueError, RecursionError):
        return None


def _python_calls(text: str, names: Collection[str]) -> list[ToolCall]:
    """`[f(a=1), g(b="x")]`, `print(f(a=1))` or `f.call(a=1)`, with literal arguments alone; nothing is ever run."""
    try:
        body = ast.parse(text.strip()[:65536], mode="exec").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    calls: list[ToolCall] = []
    for statement in body:
        value = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
        for one in value.elts if isinstance(value, ast.List) else [value]:
            call = _python_call(one, names)
            if call is None:
                return []
            calls.append(call)
    return calls


def _python_call(node: ast.AST | None, names: Collection[str]) -> ToolCall | None:
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    if isinstance(function, ast.Name) and function.id == "print" and function.id not in names and len(node.args) == 1:
        return _python_call(node.args[0], names)
    if isinstance(function, ast.Attribute) and function.attr == "call":
        function = function.value
    name = ast.unparse(function)
    if name not in names or node.args or any(keyword.arg is None for keyword in node.keywords):
        return None
    try:
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
        json.dumps(arguments, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None
    return ToolCall(name=name, arguments=arguments)
