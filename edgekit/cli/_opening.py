"""The options with which an artifact is opened: the same for `run`, `chat` and `bench`, and as in `edgekit.open`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from edgekit.common.base import Frozen
from edgekit.common.options import Option
from edgekit.errors import InvalidInput


class Opening(Frozen):
    """The keyword arguments of `edgekit.open` that are options. None is as planned."""

    context: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="Keep at most this many tokens; at most what was planned."
    )
    window: Annotated[int, Field(ge=2)] | None = Field(
        default=None,
        description="Keep only the newest tokens, sinks included, so that a text may continue without end.",
    )
    sinks: Annotated[int, Field(ge=0)] = Field(default=0, description="First tokens that a window never drops.")
    memory: Annotated[str | None, Option(metavar="SIZE")] = Field(
        default=None, description="Most private memory of this process, e.g. 1.5GiB; free memory is a bound too."
    )
    kv_bits: Annotated[int, Field(ge=1, le=32)] | None = Field(
        default=None, description="Bits of a key or value, where the engine can choose; without it, as planned."
    )
    exact: bool = Field(
        default=False,
        description="Never let chunking or drafting change the text, not even between nearly tied tokens.",
    )
    draft: Annotated[str | None, Option(metavar="PATH|ngram|early-exit|head|auto|off", default="off")] = Field(
        default=None,
        description="Proposes tokens that the model verifies, so that the text is the same and may come sooner: a"
        " smaller artifact with the same vocabulary, ngram or ngram:FILE, early-exit or early-exit:LAYER, head, auto or"
        " auto:PATH, or off.",
    )


class Pressure(Frozen):
    """The behaviour where memory is short."""

    on_pressure: Literal["degrade", "refuse"] = Field(
        default="degrade",
        description="Where memory is short: give up prefixes, then cache bits, window and context; or refuse.",
    )


def arguments_of(opening: Opening, pressure: Pressure) -> dict[str, Any]:
    """The keyword arguments of `edgekit.open`."""
    return {**opening.model_dump(), **pressure.model_dump()}


def adapter_of(given: str) -> tuple[str, Path | None]:
    """The name and the folder of `NAME=PATH`; of `NAME` alone, an adapter that is sealed in the artifact."""
    name, equals, path = given.partition("=")
    if not name or bool(equals) != bool(path):
        raise InvalidInput(
            f"--adapter {given!r}: must be NAME=PATH, PATH being a folder as PEFT saves it, or the NAME of an adapter"
            " in the artifact"
        )
    return name, Path(path) if path else None


def adapters_of(given: Sequence[str]) -> dict[str, Path]:
    """The folders of several `NAME=PATH`."""
    named = dict(adapter_of(each) for each in given)
    folders = {name: path for name, path in named.items() if path is not None}
    if len(folders) < len(given):
        raise InvalidInput("--adapter: each needs a NAME of its own and a PATH, as NAME=PATH")
    return folders
