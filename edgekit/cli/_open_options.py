"""The options of `edgekit.open` on the command line, shared by `run`, `chat` and `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from edgekit.common.base import Frozen
from edgekit.common.options import Option
from edgekit.errors import InvalidInput


class Opening(Frozen):
    """Keyword arguments of `edgekit.open`. None: as planned."""

    context: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="Keep at most this many tokens, up to the planned context."
    )
    window: Annotated[int, Field(ge=2)] | None = Field(
        default=None,
        description="Keep only this many tokens, the newest and the sinks, so that a text can continue without end.",
    )
    sinks: Annotated[int, Field(ge=0)] = Field(default=0, description="First tokens that a window never drops.")
    keep: Annotated[str | None, Option(metavar="newest|scored", default="newest")] = Field(
        default=None,
        description="What a window keeps in addition to the sinks: the newest tokens, or (scored) the newest half and"
        " the older ones whose values score highest. Also the name of a scorer: valuediff, or by attention, on onnx,"
        " snapkv.",
    )
    memory: Annotated[str | None, Option(metavar="SIZE")] = Field(
        default=None, description="Limit of this process's private memory, e.g. 1.5GiB; free memory limits it too."
    )
    kv_bits: Annotated[int, Field(ge=1, le=32)] | None = Field(
        default=None, description="Bits per key and value, if the engine offers a choice; without it, as planned."
    )
    gpu_layers: Annotated[int, Field(ge=0, le=4097)] | None = Field(
        default=None, description="Layers on the GPU, the head as one; without it, as planned (llamacpp)."
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
    """The behaviour when memory is short."""

    on_pressure: Literal["degrade", "refuse"] = Field(
        default="degrade",
        description="When memory is short: drop prefixes, then cache bits, window and context; or refuse.",
    )


def arguments_of(opening: Opening, pressure: Pressure) -> dict[str, Any]:
    """Return the keyword arguments of `edgekit.open`."""
    return {**opening.model_dump(), **pressure.model_dump()}


def adapter_of(given: str) -> tuple[str, Path | None]:
    """Split `NAME=PATH`; `NAME` alone means an adapter sealed in the artifact, with path None."""
    name, equals, path = given.partition("=")
    if not name or bool(equals) != bool(path):
        raise InvalidInput(
            f"--adapter {given!r}: give NAME=PATH with a PEFT folder, or the NAME of an adapter in the artifact"
        )
    return name, Path(path) if path else None


def adapters_of(given: Sequence[str]) -> dict[str, Path]:
    """Return the folder of every NAME. Raises `InvalidInput` for a repeated NAME or one without PATH."""
    named = dict(adapter_of(each) for each in given)
    folders = {name: path for name, path in named.items() if path is not None}
    if len(folders) < len(given):
        raise InvalidInput("--adapter: give each as NAME=PATH, with different NAMEs")
    return folders
