"""Changes of a JSON schema: objects are closed, so that a model cannot add keys endlessly, or have all their keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Visit: TypeAlias = Callable[[Any, str, bool], Any]

# Keywords whose schemas apply to the same object as their parent. Closing one of several would forbid the others' keys.
_ALTERNATIVES = ("anyOf", "oneOf")
_IN_PLACE = (*_ALTERNATIVES, "allOf", "not", "if", "then", "else", "dependentSchemas")
# Keywords whose schemas apply to a part of the object: a schema, a list of schemas, or a mapping from names to schemas.
_PARTS = (
    "items", "prefixItems", "additionalItems", "contains", "properties", "patternProperties", "additionalProperties",
    "unevaluatedItems", "unevaluatedProperties", "$defs", "definitions",
)  # fmt: skip
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SAYS_WHICH_KEYS = ("additionalProperties", "patternProperties", "unevaluatedProperties")


def close_objects(schema: Any) -> Any:
    """Return the schema with `additionalProperties: false` in every object that only has `properties`.

    Unchanged: objects that say which other keys they allow (`"additionalProperties": true` keeps one open), and objects
    that are combined with other schemas (`allOf`, `if`, `not`, or `properties` next to `anyOf` or `$ref`).
    """
    nodes: dict[str, Any] = {}  # every subschema, by its path
    combined: set[str] = set()  # the targets of references that are combined with other schemas
    waiting: list[str] = []  # those among them whose own references were not followed yet
    followed: set[str] = set()

    def collect(node: Any, path: str, is_combined: bool) -> Any:
        if isinstance(node, dict) and not (is_combined and path in followed):
            nodes[path] = node
            if is_combined:
                followed.add(path)
            target = node.get("$ref")
            if isinstance(target, str) and (is_combined or "properties" in node) and target not in combined:
                combined.add(target)
                waiting.append(target)
            _map_children(node, path, is_combined, collect)
        return node

    def close(node: Any, path: str, is_combined: bool) -> Any:
        if not isinstance(node, dict):
            return node
        is_combined = is_combined or path in combined
        closed = _map_children(node, path, is_combined, close)
        is_open = is_combined or any(key in node for key in (*_IN_PLACE, *_SAYS_WHICH_KEYS, "$ref", "$dynamicRef"))
        if isinstance(node.get("properties"), dict) and not is_open:
            closed["additionalProperties"] = False
        return closed

    collect(schema, "#", False)
    while waiting:  # a combined schema may refer to others
        path = waiting.pop()
        collect(nodes.get(path), path, True)
    return close(schema, "#", False)


def require_all(schema: Any) -> Any:
    """Return the schema with every listed property required, also those that have a default.

    The schema of a pydantic class requires only fields without a default, so a model may leave out all others.
    """

    def visit(node: Any, path: str, is_combined: bool) -> Any:
        if not isinstance(node, dict):
            return node
        mapped = _map_children(node, path, is_combined, visit)
        if isinstance(node.get("properties"), dict):
            mapped["required"] = list(node["properties"])
        return mapped

    return visit(schema, "#", False)


def _map_children(node: dict[str, Any], path: str, is_combined: bool, visit: Visit) -> dict[str, Any]:
    """Return `node` with `visit(child, path, is_combined)` in place of every direct subschema."""
    mapped = dict(node)
    for key in (*_IN_PLACE, *_PARTS):
        value, where = node.get(key), f"{path}/{key}"
        combines = key in _IN_PLACE and (is_combined or "properties" in node or key not in _ALTERNATIVES)
        if isinstance(value, list):
            mapped[key] = [visit(each, f"{where}/{index}", combines) for index, each in enumerate(value)]
        elif isinstance(value, dict) and key in _BY_NAME:
            mapped[key] = {name: visit(each, f"{where}/{name}", combines) for name, each in value.items()}
        elif isinstance(value, dict):
            mapped[key] = visit(value, where, combines)
    return mapped
