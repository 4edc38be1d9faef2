"""Makes the options of a command from the fields of frozen models, and gives the command one validated object each.

    class Answer(Frozen):
        system: str | None = Field(default=None, description="A system message before the conversation.")

    @click.command()
    @options(answer=Answer)
    def command(answer: Answer) -> None: ...

The option takes its name, type, default and help from the field; `Option` changes the spelling. A tuple field is a
repeatable option, a `bool` a flag; a field without a description is no option. `model_fields_set` holds the given
options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from shlex import quote
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import click
from pydantic import BaseModel, BeforeValidator, Field
from pydantic.fields import FieldInfo

from edgekit.common.base import Frozen
from edgekit.common.options import Option, read_options
from edgekit.errors import InvalidInput

Command = TypeVar("Command", bound=Callable[..., Any])
# The section of a command's help that lists the options of a keyword of `options`; all others stand under "Options".
_SECTIONS = {
    "devices": "Devices", "files": "Files", "added": "Files", "calibrating": "Calibration",
    "request": "Requirements and preferences",
    "opening": "Memory, windows and drafts", "answering": "The answer's form",
    "sampling": "Sampling", "stopping": "When an answer ends", "shown": "Output", "served": "Models",
    "settings": "Access and limits", "read": "Text",
}  # fmt: skip


# The options of opening an artifact for one answer at a time.
OPENING = ("context", "window", "keep", "memory", "kv_bits", "exact", "draft")
# The options of choosing integers, of every command that quantises.
CALIBRATION = ("calibrate", "method", "effort", "compute", "store")


class SectionedCommand(click.Command):
    """A command whose help lists its options by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                keyword = (parameter.name or "").partition("_")[0]
                sections.setdefault(_SECTIONS.get(keyword, "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class SomeFields(NamedTuple):
    """Some fields of a model as options of a command, which gets the whole model with its defaults for the others."""

    model: type[BaseModel]
    names: Sequence[str]


class LinesOutput(Frozen):
    output: Annotated[Path | None, Option(short="o")] = Field(default=None, description="Write jsonl here; resumable.")


class OwnProfiles(Frozen):
    profiles: Annotated[tuple[Path, ...], Option(metavar="DIR")] = Field(
        default=(), description="A folder of your own profiles."
    )


class PlanDevices(OwnProfiles):
    """The devices of `plan` and `export`, and options that go with them."""

    devices: Annotated[tuple[str, ...], Option(name="device", default="this")] = Field(
        default=(), description="A device profile by name or path, or `this`."
    )
    draft: str | None = Field(default=None, description="A draft model to run with MODEL; its memory is planned too.")

    def names(self) -> list[str]:
        return list(self.devices) or ["this"]


def options(**given: type[BaseModel] | SomeFields) -> Callable[[Command], Command]:
    """Add an option for each field of the given models; the command gets one validated object per keyword."""
    models = {keyword: _all_fields(each) for keyword, each in given.items()}

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(*arguments: Any, **given: Any) -> Any:
            for keyword, (model, names) in models.items():
                raw = {field: given.pop(f"{keyword}_{field}") for field in names}
                values = {field: value for field, value in raw.items() if _is_given(model, field, value)}
                typed = {_name(model, field): value for field, value in values.items()}
                click.get_current_context().meta[f"{__name__}.{keyword}"] = typed
                given[keyword] = read_options(model, values, partial(_name, model))
            return command(*arguments, **given)

        result: Any = run
        for keyword, (model, names) in reversed(models.items()):
            for field in reversed(names):
                result = _option(keyword, model, field)(result)
        return result  # type: ignore[no-any-return]

    return decorate


def json_option(description: str) -> Callable[[Command], Command]:
    """Add the flag `--json`, which changes only what a command prints."""
    return click.option("--json", "as_json", is_flag=True, help=description)


def _is_given(model: type[BaseModel], field: str, value: object) -> bool:
    is_unset_flag = value is False and model.model_fields[field].default is False
    return value is not None and value != () and not is_unset_flag


def _all_fields(given: type[BaseModel] | SomeFields) -> SomeFields:
    if isinstance(given, SomeFields):
        return given
    return SomeFields(given, [name for name, field in given.model_fields.items() if field.description])


class _Kind(NamedTuple):
    """An option's value type and the metadata of its annotation."""

    type: Any
    is_multiple: bool
    metadata: tuple[object, ...]


def _kind(annotation: Any) -> _Kind:
    """Unwrap `Annotated`, `| None` and tuples. Types that click lacks become text."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        kind = _kind(inner)
        return _Kind(_text_if_parsed(kind.type, metadata), kind.is_multiple, (*metadata, *kind.metadata))
    if origin in (Union, UnionType):
        kinds = [_kind(each) for each in get_args(annotation) if each is not NoneType]
        return kinds[0] if len(kinds) == 1 else _Kind(str, False, ())
    if origin is Mapping:
        return _Kind(str, True, ())
    if origin is tuple:
        return _kind(get_args(annotation)[0])._replace(is_multiple=True)
    if origin is Literal:
        return _Kind(click.Choice(get_args(annotation)), False, ())
    if annotation is Path:
        return _Kind(click.Path(path_type=Path), False, ())
    return _Kind(annotation if annotation in (int, float, bool) else str, False, ())


def _text_if_parsed(kind: Any, metadata: list[Any]) -> Any:
    return str if any(isinstance(each, BeforeValidator) for each in metadata) else kind


def _described(field: FieldInfo) -> _Kind:
    kind = _kind(field.annotation)
    return _Kind(_text_if_parsed(kind.type, field.metadata), kind.is_multiple, (*field.metadata, *kind.metadata))


def _name(model: type[BaseModel], field: str) -> str:
    """Return the option's long name, dashes included."""
    return f"--{(_option_of(_described(model.model_fields[field])).name or field).replace('_', '-')}"


def _option_of(kind: _Kind) -> Option:
    """Return the annotation's first `Option`, with the first metavar that any of its options has."""
    every = [each for each in kind.metadata if isinstance(each, Option)]
    metavar = next((each.metavar for each in every if each.metavar), "")
    return (every[0] if every else Option())._replace(metavar=metavar)


def _option(keyword: str, model: type[BaseModel], field: str) -> Callable[[Any], Any]:
    info = model.model_fields[field]
    kind = _described(info)
    option = _option_of(kind)
    is_flag = kind.type is bool
    text = info.description or ""
    if kind.is_multiple:
        text += " May be repeated."
    default = option.default or ("" if info.is_required() or is_flag else info.get_default(call_default_factory=True))
    if default not in (None, "", (), {}):
        text += f"  [default: {default}]"
    switches: dict[str, Any] = {"type": kind.type, "multiple": kind.is_multiple}
    if is_flag:
        switches = {"is_flag": True, "default": None} if option.negative else {"is_flag": True, "flag_value": True}
    return click.option(
        *([f"-{option.short}"] if option.short else []),
        _name(model, field) + (f"/--{option.negative}" if option.negative else ""),
        f"{keyword}_{field}",
        required=info.is_required(),
        metavar=option.metavar or None,
        help=text,
        **switches,
    )


def as_typed(*keywords: str) -> list[str]:
    """Return the given options of these models as typed, for printing a follow-up command."""
    words = []
    for name, value in given_options(*keywords).items():
        if value is True:
            words.append(name)
        elif value is not False:
            for each in value if isinstance(value, tuple) else (value,):
                words += [name, quote(str(each))]
    return words


def given_options(*keywords: str) -> dict[str, Any]:
    """Return the given options of these models by their long names."""
    meta = click.get_current_context().meta
    return {name: value for keyword in keywords for name, value in meta[f"{__name__}.{keyword}"].items()}


def adapter_of(given: str) -> tuple[str, Path | None]:
    """Split `NAME=PATH`; `NAME` alone means an adapter sealed in the artifact, with path None."""
    name, equals, path = given.partition("=")
    if not name or bool(equals) != bool(path):
        raise InvalidInput(
            f"--adapter {given!r}: give NAME=PATH with a PEFT folder, or the NAME of an adapter in the artifact"
        )
    return name, Path(path) if path else None
