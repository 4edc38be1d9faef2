"""Validates the arguments of tool calls against the tools' JSON schemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from edgekit.errors import TargetMissing, Unsupported, quote_short


def check_schema(schema: Any, where: str) -> None:
    """Raise `Unsupported` for an invalid JSON schema, `TargetMissing` if `jsonschema` is not installed."""
    try:
        _validator(schema)
    except Unsupported as error:
        raise Unsupported(f"{where}: {error}") from error


def violation(value: Any, schema: Any) -> str | None:
    """Return the first violation of a tool's `schema` by the arguments `value`, or None if they match.

    A `$ref` must point into the schema itself: nothing is fetched. OpenAPI's `nullable` allows null.
    """
    validator = _validator(schema)
    import jsonschema
    import referencing

    try:
        error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    except referencing.exceptions.Unresolvable as unresolvable:
        raise Unsupported(
            f"a tool's schema refers to {quote_short(unresolvable.ref)}, which is not in the schema; write it out there"
        ) from unresolvable
    except RecursionError as deep:
        raise Unsupported("a tool's schema and arguments are nested too deeply to be checked") from deep
    return None if error is None else f"arguments{error.json_path.removeprefix('$')}: {quote_short(error.message)}"


def _validator(schema: Any) -> Any:
    kind = validator_class()
    import jsonschema
    import referencing

    try:
        kind.check_schema(schema)
    except jsonschema.exceptions.SchemaError as error:
        raise Unsupported(
            f"a tool's schema is not valid at {error.json_path}: {quote_short(error.message)}; correct it"
        ) from error
    return kind(schema, registry=referencing.Registry())  # the default registry would fetch remote schemas


@cache
def validator_class() -> Any:
    try:
        from jsonschema import Draft202012Validator, validators
    except ImportError as error:
        raise TargetMissing("tasks with tools need jsonschema; pip install 'edgekit[eval]'") from error

    def nullable(check: Any) -> Any:
        def checked(validator: Any, expected: Any, value: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
            if value is not None or schema.get("nullable") is not True:
                yield from check(validator, expected, value, schema) or ()

        return checked

    plain = Draft202012Validator.VALIDATORS
    return validators.extend(Draft202012Validator, {key: nullable(plain[key]) for key in ("type", "enum", "const")})
