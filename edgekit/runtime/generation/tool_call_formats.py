"""The formats of tool calls that models are trained on. Only calls of offered tools count; the rest is text."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, TypeAlias

from edgekit.common.base import Frozen

_MOST_PARTS = 8  # of a name with dots
_DECODER = json.JSONDecoder(parse_constant=lambda name: None)


class ToolCall(Frozen):
    """A function that the model asks to be called."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """Identifies the call in the message with its result: `{"role": "tool", "tool_call_id": call.id, ...}`."""

    def as_json(self) -> dict[str, Any]:
        """Return the call as plain JSON values, in the form of a message's `tool_calls`."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallMatch(NamedTuple):
    """A part of a text, and the calls in it."""

    start: int
    stop: int
    calls: list[ToolCall]


CallFormat: TypeAlias = Callable[[str, Collection[str]], Iterator[CallMatch]]


class Markers(NamedTuple):
    """The markers before and after calls. Without an end marker, calls reach to the end of the text."""

    start: re.Pattern[str]
    end: re.Pattern[str]
    is_end_outside: bool = False
    """True where the end marker is also the start of the next calls."""


HERMES = Markers(re.compile("<tool_call>"), re.compile("</tool_call>"))
_MISTRAL_CALLS = Markers(re.compile(r"\[TOOL_CALLS\]"), re.compile(r"\[TOOL_CALLS\]"), is_end_outside=True)
PHI = Markers(re.compile(r"<\|tool_call\|>|functools(?=\[)"), re.compile(r"<\|/tool_call\|>"))
_PYTHON_TAG = Markers(re.compile(r"<\|python_tag\|>"), re.compile(r"<\|eom_id\|>|<\|eot_id\|>"))
_IS_JSON = re.compile(r"(?:\s*[\w.-]{1,128}(?:\[CALL_ID\][\w-]*)?\[ARGS\])?\s*[\[{]")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_LONGEST_STRING = 1 << 16  # bounds the cost of quotes that do not match


def _blocks(text: str, markers: Markers) -> Iterator[tuple[int, int, str]]:
    """Yield the start, the end and the inner text of each block of calls."""
    index = 0
    while begin := markers.start.search(text, index):
        end = find_end_marker(text, begin.end(), markers.end)
        inner_stop = end.start() if end else len(text)
        index = inner_stop if markers.is_end_outside or end is None else end.end()
        yield begin.start(), index, text[begin.end() : inner_stop]


def find_end_marker(text: str, start: int, marker: re.Pattern[str], is_whole: bool = True) -> re.Match[str] | None:
    """Find the next `marker` after `start` that is not part of a JSON string.

    At a string without an end, return the first marker if `is_whole`, else None.
    """
    first = end = marker.search(text, start)
    place = start if _IS_JSON.match(text, start) else len(text)
    while end and (quote := text.find('"', place, end.start())) >= 0:
        string = _STRING.match(text, quote, quote + _LONGEST_STRING)
        if string is None:
            return first if is_whole else None
        place = string.end()
        if place > end.start():
            end = marker.search(text, place)
    return end


def _hermes(text: str, names: Collection[str]) -> Iterator[CallMatch]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen, SmolLM)."""
    for start, stop, inner in _blocks(text, HERMES):
        yield CallMatch(start, stop, _calls_in(inner, names))


def _mistral(text: str, names: Collection[str]) -> Iterator[CallMatch]:
    """`[TOOL_CALLS][{...}]`, and the newer `[TOOL_CALLS]name[ARGS]{...}`."""
    for start, stop, inner in _blocks(text, _MISTRAL_CALLS):
        named = re.match(r"\s*([\w.-]{1,128})(?:\[CALL_ID\][\w-]*)?\[ARGS\](.*)", inner, re.DOTALL)
        arguments = _first_json(named[2]) if named else None
        if named and named[1] in names and isinstance(arguments, dict):
            yield CallMatch(start, stop, [ToolCall(name=named[1], arguments=arguments)])
        elif not named:
            yield CallMatch(start, stop, _calls_in(inner, names))


def _phi(text: str, names: Collection[str]) -> Iterator[CallMatch]:
    """`<|tool_call|>[{...}]<|/tool_call|>` (Phi-4-mini), also with `functools[...]`."""
    for start, stop, inner in _blocks(text, PHI):
        yield CallMatch(start, stop, _calls_in(inner, names))


def _python_tag(text: str, names: Collection[str]) -> Iterator[CallMatch]:
    """`<|python_tag|>` before JSON or before `tool.call(key=value)` (Llama 3.x)."""
    for start, stop, inner in _blocks(text, _PYTHON_TAG):
        yield CallMatch(start, stop, _calls_in(inner, names) or _python_calls(inner, names))


def _code_blocks(text: str, names: Collection[str]) -> Iterator[CallMatch]:
    """A fenced block of calls and nothing else, as JSON or as Python (Gemma)."""
    for match in re.finditer(r"```(?:tool_code|tool_call|json|python)[^\S\n]*\n(.*?)\n?```", text, re.DOTALL):
        yield CallMatch(match.start(), match.end(), _calls_in(match[1], names) or _python_calls(match[1], names))


def _bare(text: str, names: Collection[str]) -> Iterator[CallMatch]:
    """An answer of JSON calls only (Llama 3.x), or of a list of Python calls only (Llama 3.2, Gemma)."""
    if text.strip()[:1] in ("{", "["):
        yield CallMatch(0, len(text), _calls_in(text, names) or _python_calls(text, names))


def _calls_in(text: str, names: Collection[str]) -> list[ToolCall]:
    """Read `text` as one JSON call, a list of calls, or several in a row. Returns no calls for any other text."""
    calls: list[ToolCall] = []
    rest = text.strip()
    surplus = "}" if re.match(r"\{\s*\{", rest) else ""  # a published template shows its calls with doubled braces
    rest = rest[len(surplus) :].lstrip()
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
        rest = rest[stop:].lstrip(f" \t\r\n;,{surplus}")
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
    """`[f(a=1), g(b="x")]`, `print(f(a=1))` or `f.call(a=1)`, with literal arguments only. Nothing is executed."""
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
    name = _dotted(function)
    if name is None or name not in names or node.args or any(keyword.arg is None for keyword in node.keywords):
        return None
    try:
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
        json.dumps(arguments, allow_nan=False)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None
    return ToolCall(name=name, arguments=arguments)


def _dotted(node: ast.expr) -> str | None:
    """Return a name such as `a.b`; None for anything else, and for more parts than a tool's name has."""
    parts = list[str]()
    while isinstance(node, ast.Attribute) and len(parts) < _MOST_PARTS:
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


FORMATS: tuple[CallFormat, ...] = (_hermes, _mistral, _phi, _python_tag, _code_blocks, _bare)
MARKED: tuple[tuple[str, CallFormat], ...] = (("</tool_call>", _hermes), ("<|/tool_call|>", _phi))
