"""The options of `edgekit.open`, for Python, the command line, the server, benchmarks and the lab."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, ParamSpec, Protocol, TypeVar, overload

from pydantic import ConfigDict, Field, SkipValidation

from edgekit.common.base import Frozen
from edgekit.common.options import ByteText, Option, one_of
from edgekit.runtime.memory.admission import OnPressure
from edgekit.runtime.speculation.controller import DrafterFactory

Given = ParamSpec("Given")
Result = TypeVar("Result", covariant=True)


class OpenOptions(Frozen):
    """Options of `edgekit.open`. None: as planned."""

    model_config = ConfigDict(arbitrary_types_allowed=True)  # of `drafting`

    target: str | None = Field(
        default=None,
        description="Only this target: onnx, mlx, llamacpp, executorch or an installed one. A model that is no artifact"
        " is made one for it.",
    )
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
    memory: Annotated[ByteText, Field(ge=1)] | None = Field(
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
        description="Never let batching, chunking or drafting change the text, not even between nearly tied tokens.",
    )
    draft: Annotated[str | Path | None, Option(metavar="PATH|ngram|early-exit|head|auto|off", default="off")] = Field(
        default=None,
        description="Proposes tokens that the model verifies, so that the text is the same and may come sooner: a"
        " smaller artifact with the same vocabulary, ngram, early-exit or early-exit:LAYER, head, auto or"
        " auto:PATH, or off.",
    )
    drafting: SkipValidation[DrafterFactory] | None = Field(
        default=None, description="A `DrafterFactory` of your own, instead of `draft`."
    )
    sequences: Annotated[int, Field(ge=1, le=256)] | None = Field(
        default=None, description="Requests that are computed together; without it, as planned."
    )
    prefixes: Annotated[ByteText, Field(ge=0)] | None = Field(
        default=None, description="Size of the prefix cache that requests share, e.g. 64MiB; 0: none."
    )
    on_pressure: OnPressure = Field(
        default="degrade",
        description="When memory is short: drop prefixes, then cache bits, window and context; or refuse.",
    )
    warm_template: bool = Field(default=False, description="Start the chat template's process while the model loads.")
    require_signature: str | Path | None = Field(
        default=None,
        description="A public key or a certificate of an authority in PEM, or a folder of them; the artifact must be"
        " signed with one (`edgekit sign`). Needs the extra `sign`.",
    )
    guard: str | Path | None = Field(
        default=None,
        description="A file of the app that notes openings and first tokens. After two starts in a row that died, the"
        " third opens a smaller setting (`Runtime.notes` says so): less context and no prefixes, in the end the former"
        " artifact of a pull. It stays until the artifact changes or the file is removed.",
    )


class Opens(Protocol[Given, Result]):
    """A function of an artifact's path and `OpenOptions`, which are given as one object or by keyword."""

    @overload
    def __call__(self, path: str | Path, options: OpenOptions, /) -> Result: ...

    @overload
    def __call__(self, path: str | Path, /, *args: Given.args, **given: Given.kwargs) -> Result: ...


def by_keyword(
    model: Callable[Given, OpenOptions],
) -> Callable[[Callable[[str | Path, OpenOptions], Result]], Opens[Given, Result]]:
    """Let a function of a path and `OpenOptions` take the fields of `model` as keywords too, with their types."""

    def decorate(function: Callable[[str | Path, OpenOptions], Result]) -> Any:
        @wraps(function)
        def call(path: str | Path, options: OpenOptions | None = None, **given: Any) -> Result:
            return function(path, one_of(options, OpenOptions, given))

        fields = signature(model).parameters.values()
        place = Parameter("path", Parameter.POSITIONAL_OR_KEYWORD)
        call.__signature__ = signature(call).replace(parameters=[place, *fields])  # type: ignore[attr-defined]
        return call

    return decorate
