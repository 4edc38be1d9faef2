"""Whether arguments follow a tool's JSON schema: the keywords that tools use; any other is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from edgekit.errors import Unsupported, clip

_IGNORED = {"title", "description", "default", "examples", "$schema", "$id", "format", "deprecated", "strict"}
_CHECKED = {
    "type", "enum", "const", "properties", "required", "additionalProperties", "items", "minItems", "maxItems",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "anyOf",
    "oneOf", "nullable",
}  # fmt: skip
_MAX_DEPTH = 32
_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: not isinstance(value, bool) and isinstance(value, int | float) and value % 1 == 0,
    "number": lambda value: not isinstance(value, bool) and isinstance(value, int | float),
}


def violation(value: Any, schema: Any, where: str = "arguments") -> str | None:
    """The first thing in which `value` departs from `schema`; None where it follows it."""
    return next(_violations(value, schema, where, 0), None)


def _violations(value: Any, schema: Any, where: str, depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        if schema is False:
            yield f"{where}: nothing is allowed here"
        return
    unknown = [key for key in schema if key not in _IGNORED | _CHECKED]
    if unknown or depth > _MAX_DEPTH:
        what = f"keyword {clip(unknown[0])}" if unknown else f"nesting over {_MAX_DEPTH}"
        raise Unsupported(f"a tool's schema uses {what}, which is not checked here; leave it out")
    if value is None and schema.get("nullable"):
        return
    kinds = schema.get("type")
    if kinds is not None and not any(_is(value, kind) for kind in (kinds if isinstance(kinds, list) else [kinds])):
        yield f"{where}: expected {kinds}, found {clip(value)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {clip(value)} is none of {clip(schema['enum'])}"
    if "const" in schema and value != schema["const"]:
        yield f"{where}: {clip(value)} is not {clip(schema['const'])}"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            fits = sum(violation(value, each, where) is None for each in schema[key])
            if fits == 0 or (key == "oneOf" and fits > 1):
                yield f"{where}: follows {fits} of the schemas of {key}"
    if isinstance(value, dict):
        yield from _in_object(value, schema, where, depth)
    elif isinstance(value, list):
        yield from _in_array(value, schema, where, depth)
    elif isinstance(value, str):
        yield from _in_string(value, schema, where)
    elif not isinstance(value, bool) and isinstance(value, int | float):
        yield from _in_number(value, schema, where)


def _is(value: Any, kind: str) -> bool:
    if kind not in _TYPES:
        raise Unsupported(f"a tool's schema uses type {clip(kind)}; known: {', '.join(_TYPES)}")
    return _TYPES[kind](value)


def _in_object(value: dict[str, Any], schema: Mapping[str, Any], where: str, depth: int) -> Iterator[str]:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{where}: {clip(name)} is missing"
    for name, each in value.items():
        if name in properties:
            yield from _violations(each, properties[name], f"{where}.{name}", depth + 1)
        elif schema.get("additionalProperties", True) is False:
            yield f"{where}: {clip(name)} is not a parameter"
        else:
            yield from _violations(each, schema.get("additionalProperties", True), f"{where}.{name}", depth + 1)


def _in_array(value: list[Any], schema: Mapping[str, Any], where: str, depth: int) -> Iterator[str]:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        yield f"{where}: has {len(value)} items"
    for place, each in enumerate(value):
        yield from _violations(each, schema.get("items", True), f"{where}[{place}]", depth + 1)


def _in_string(value: str, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        yield f"{where}: has {len(value)} characters"
    if "pattern" in schema and re.search(str(schema["pattern"]), value) is None:
        yield f"{where}: {clip(value)} does not match {clip(schema['pattern'])}"


def _in_number(value: float, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    below = schema.get("minimum", value) > value or schema.get("exclusiveMinimum", value - 1) >= value
    above = schema.get("maximum", value) < value or schema.get("exclusiveMaximum", value + 1) <= value
    if below or above:
        yield f"{where}: {value} is out of range"
