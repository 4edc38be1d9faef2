"""Options as fields of a frozen model: one definition for Python, command line and documentation.

A field's `description` is its help. A field without one is not an option of the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ValidationError

from edgekit.common.units import parse_bytes
from edgekit.errors import InvalidInput, near_names, quote_short

Model = TypeVar("Model", bound=BaseModel)

_BOUNDS = {
    "greater_than_equal": ("ge", "must be at least {}"),
    "greater_than": ("gt", "must be more than {}"),
    "less_than_equal": ("le", "must be at most {}"),
    "less_than": ("lt", "must be less than {}"),
}


class Option(NamedTuple):
    """The command-line spelling of a field, if it differs from the field's name and type."""

    name: str = ""  # without dashes; empty: the field's name
    short: str = ""  # one letter
    metavar: str = ""
    negative: str = ""  # of a flag: the name of the option that says no
    default: str = ""  # shown in the help instead of the field's default


def _size(value: object) -> object:
    try:
        return parse_bytes(value) if isinstance(value, str) else value
    except InvalidInput as error:
        raise ValueError(str(error).removeprefix("size: ")) from error


ByteCount = Annotated[int, BeforeValidator(_size), Option(metavar="SIZE")]
"""Bytes, given as a number or as text such as `1.5GiB`."""

# The same, with the text in its type, for models that callers build themselves; the value is a number.
ByteText = Annotated[int | str, BeforeValidator(_size), Option(metavar="SIZE")]


def read_options(
    model: type[Model], given: Mapping[str, Any], spelled: Callable[[str], str] = lambda field: field
) -> Model:
    """Validate `given` as `model`. Raises `InvalidInput` with the option, the value and its bound.

    `spelled` maps a field to the caller's name for it, such as `--memory`.
    """
    unknown = next((name for name in given if name not in model.model_fields), None)
    if unknown is not None:
        raise unknown_option(unknown, model.model_fields)
    try:
        return model(**given)
    except ValidationError as error:
        raise InvalidInput(_sentence(error, spelled)) from error


def one_of(options: Model | None, model: type[Model], given: Mapping[str, Any]) -> Model:
    """Return `options`, or those given by keyword; both together are refused."""
    if options is None:
        return read_options(model, given)
    if given:
        raise InvalidInput(f"{', '.join(given)}: give {model.__name__} or keywords, not both")
    return options


def unknown_option(name: str, known: Iterable[str]) -> InvalidInput:
    """Return the error for an unknown option, with the most similar known one."""
    names = sorted(known)
    near = near_names(name, names)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
    return InvalidInput(f"unknown option {quote_short(name)}; {hint}")


def _sentence(error: ValidationError, spelled: Callable[[str], str]) -> str:
    first = error.errors()[0]
    name, kind = spelled(str(first["loc"][0])), first["type"]
    if kind == "value_error":
        return f"{name}: {first['ctx']['error']}"
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        reason = words.format(first["ctx"][key])
    else:
        reason = first["msg"][0].lower() + first["msg"][1:]
    return f"{name} {quote_short(first['input'])}: {reason}"
