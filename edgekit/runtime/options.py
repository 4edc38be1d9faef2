"""What may be asked of an answer, under the names that the API and the command line share."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

from pydantic import Field, ValidationError

from edgekit.errors import InvalidInput, clip
from edgekit.frozen import Frozen
from edgekit.runtime.sampling import Sampling
from edgekit.runtime.stopping import Stopping

Way: TypeAlias = Literal["ngram", "early-exit", "model"]
"""One way of drafting, of those with which a runtime was opened."""


class Options(TypedDict, total=False):
    """How tokens are chosen, when the answer ends, and which shape it must have."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    seed: int | None
    logprobs: int | None
    max_tokens: int | None
    stop: tuple[str, ...] | list[str]
    stop_tokens: tuple[int, ...] | list[int]
    ignore_eos: bool
    schema: dict[str, Any] | str | None
    regex: str | None
    grammar: str | None
    priority: int
    tenant: str
    context: int | None
    window: int | None
    sinks: int
    drafting: bool | Way
    adapter: str | None


class Queueing(Frozen):
    """When a request runs, with which adapter, and with whom it shares what was computed before."""

    priority: int = Field(default=0, ge=-100, le=100)
    tenant: str = Field(default="", max_length=256)
    adapter: str | None = Field(default=None, max_length=64)


class Keeping(Frozen):
    """What one request keeps of what it has fed, within what the runtime was opened with; and who drafts for it."""

    context: int | None = Field(default=None, ge=2)
    window: int | None = Field(default=None, ge=2)
    sinks: int = Field(default=0, ge=0)
    drafting: bool | Way = True


class Shape(Frozen):
    """The shape that an answer must have; at most one."""

    schema_: dict[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None

    @property
    def chosen(self) -> tuple[str, Any] | None:
        """The one shape that is asked for, by name."""
        pairs = (("schema", self.schema_), ("regex", self.regex), ("grammar", self.grammar))
        given = [(name, value) for name, value in pairs if value is not None]
        if len(given) > 1:
            raise InvalidInput(f"{' and '.join(name for name, _ in given)} exclude each other; give one")
        return given[0] if given else None


class Wish(NamedTuple):
    """Understood options."""

    sampling: Sampling
    stopping: Stopping
    shape: Shape
    queueing: Queueing
    keeping: Keeping


def understood(options: Mapping[str, Any]) -> Wish:
    """`options`, checked; an unknown name or a value out of bounds is refused by name."""
    for name in options:
        if name not in Options.__annotations__:
            near = get_close_matches(name, Options.__annotations__, n=1)
            cure = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(Options.__annotations__))}"
            raise InvalidInput(f"unknown option {clip(name)}; {cure}")
    if isinstance(options.get("stop"), str):
        raise InvalidInput(f"stop: must be a list of strings, found {clip(options['stop'])}")
    given = {("schema_" if name == "schema" else name): value for name, value in options.items()}
    return Wish(*(_checked(kind, given) for kind in (Sampling, Stopping, Shape, Queueing, Keeping)))


def _checked(kind: Any, given: Mapping[str, Any]) -> Any:
    try:
        return kind(**{name: value for name, value in given.items() if name in kind.model_fields})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part).removesuffix("_") for part in first["loc"])
        raise InvalidInput(f"{where}: {first['msg']} (found {clip(first['input'])})") from error
