"""Readers of untrusted JSON and YAML, limited in size and depth; errors name file, line, field and value."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from edgekit.common.files import not_read, open_regular
from edgekit.common.units import show_bytes
from edgekit.errors import InvalidInput, quote_short

MAX_TEXT_BYTES = 8 << 20
MAX_YAML_BYTES = 1 << 20
MAX_DEPTH = 32

# libyaml, if PyYAML was built with it, is ten times as fast and gives the same nodes.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_LIBYAML_TOO_DEEP = "exceeded maximum nesting depth"  # of newer libraries, which read ahead of the events below

_PLAIN_KEY = re.compile(r"[\w ./:+-]{1,100}")

Model = TypeVar("Model", bound=BaseModel)


def read_bytes(path: Path, limit_bytes: int) -> bytes:
    """Read a regular file of at most `limit_bytes`; pipes, devices and directories are refused unopened."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit_bytes:
                raise InvalidInput(f"{path}: {show_bytes(size)} is more than the {show_bytes(limit_bytes)} allowed")
            return file.read(limit_bytes)
    except (OSError, ValueError) as error:
        raise not_read(path, error) from error


def read_text(path: Path, limit_bytes: int = MAX_TEXT_BYTES) -> str:
    """Read a file of UTF-8 text."""
    try:
        return read_bytes(path, limit_bytes).decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: is not text in UTF-8: {error.reason} at byte {error.start:,}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    return parse_json(read_bytes(path, MAX_TEXT_BYTES), str(path))


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """Parse `data` as a JSON object; NaN, duplicate keys and deep nesting are refused."""
    try:
        value = json.loads(data, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except RecursionError as error:
        raise InvalidInput(f"{where}: nested too deeply") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{where}: not valid JSON: {error}; is the file complete?") from error
    if not isinstance(value, dict):
        raise InvalidInput(f"{where}: holds {type(value).__name__}, expected an object")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"the key {quote_short(key)} occurs twice")
        unique[key] = value
    return unique


def read_yaml(path: Path | Traversable, model: type[Model]) -> Model:
    """Read a YAML file into `model`; errors name the file, the line and the field."""
    where = str(path)
    if isinstance(path, Path):
        data = read_bytes(path, MAX_YAML_BYTES)
    else:
        data = path.read_bytes()
    return parse_yaml(data, model, where)


def parse_yaml(data: bytes, model: type[Model], where: str) -> Model:
    """Parse YAML text into `model`; errors name the line and the field."""
    node = _compose(data, where)
    try:
        plain = _plain(node, where, yaml.SafeLoader(""))
        return model.model_validate_json(json.dumps(plain))
    except ValidationError as error:
        first = _first(error)
        line = _line_of(node, first["loc"])
        raise InvalidInput(f"{where}:{line}: {_sentence(first)}") from error


def validate(data: bytes | str, model: type[Model], where: str) -> Model:
    """Parse JSON text into `model`; an error names the field and the value."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise InvalidInput(f"{where}: {sentence_of(error)}") from error


def sentence_of(error: ValidationError) -> str:
    """Describe the first error: the field, the reason and the value."""
    return _sentence(_first(error))


def _first(error: ValidationError) -> Any:
    """Choose the error to report: an unknown field first, because its misspelling causes a missing field too."""
    return min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")


def _sentence(error: Any) -> str:
    field = _path(error["loc"]) or "the whole"
    if error["type"] == "extra_forbidden":
        return f"{field}: unknown field; remove it or correct its spelling"
    if error["type"] == "missing":
        return f"{field}: is missing"
    if error["type"] == "union_tag_not_found":
        return f"{_tag(error)}: is missing (found {quote_short(error['input'])})"
    if error["type"] == "union_tag_invalid":
        return f"{_tag(error)}: {quote_short(error['ctx']['tag'])} is not among {error['ctx']['expected_tags']}"
    if error["type"] == "value_error":
        return f"{field}: {error['ctx']['error']}"
    return f"{field}: {error['msg']} (found {quote_short(error['input'])})"


def _tag(error: Any) -> str:
    """Return the path of the field that discriminates the variants of an object."""
    return _path([*error["loc"], str(error["ctx"]["discriminator"]).strip("'")])


def _path(parts: Iterable[int | str]) -> str:
    """Return the path of a field. Keys come from the file, so long or unprintable ones are quoted."""
    return ".".join(text if _PLAIN_KEY.fullmatch(text := str(part)) else quote_short(text) for part in parts)


def _compose(data: bytes, where: str) -> yaml.Node:
    try:
        text = data.decode()
        _refuse_bombs(text, where)
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        if error.problem == _LIBYAML_TOO_DEEP:
            raise InvalidInput(f"{where}:{line}: nested more than {MAX_DEPTH} deep") from error
        raise InvalidInput(f"{where}:{line}: not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise InvalidInput(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error
    if node is None:
        raise InvalidInput(f"{where}: is empty")
    return node


def _refuse_bombs(text: str, where: str) -> None:
    """Refuse aliases, which can expand without bound, and deep nesting, which can exhaust a parser's stack."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.AliasEvent):
            raise InvalidInput(
                f"{where}:{line}: aliases (*{quote_short(event.anchor)}) are not allowed; write the value out"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise InvalidInput(f"{where}:{line}: nested more than {MAX_DEPTH} deep")


def _plain(node: yaml.Node, where: str, constructor: Any, field: str = "the whole") -> Any:
    """Convert a node to values that JSON can hold; duplicate keys are refused."""
    line = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            at = f"{where}:{key_node.start_mark.line + 1}"
            if not isinstance(key, str):
                raise InvalidInput(f"{at}: {field}: a key must be a plain word")
            if key in values:
                raise InvalidInput(f"{at}: {field}: the key {quote_short(key)} occurs twice; remove one")
            inner = key if field == "the whole" else f"{field}.{key}"
            values[key] = _plain(value_node, where, constructor, inner)
        return values
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, where, constructor, f"{field}.{index}") for index, item in enumerate(node.value)]
    if node.tag == "tag:yaml.org,2002:timestamp":
        return node.value
    try:
        value = constructor.construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        reason = getattr(error, "problem", None) or str(error)
        raise InvalidInput(f"{where}:{line}: {field}: {quote_short(node.value)} cannot be read: {reason}") from error
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and value == value and abs(value) != float("inf"):
        return value
    raise InvalidInput(f"{where}:{line}: {field}: {quote_short(node.value)} is not a plain value")


def _line_of(node: yaml.Node, location: tuple[int | str, ...]) -> int:
    """Return the line of the deepest part of `location` that the file contains."""
    for part in location:
        if isinstance(node, yaml.MappingNode):
            entries = [(key, value) for key, value in node.value if key.value == part]
            if not entries:
                break
            key, value = entries[0]
            node = value if isinstance(value, yaml.MappingNode | yaml.SequenceNode) else key
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
        else:
            break
    return node.start_mark.line + 1
