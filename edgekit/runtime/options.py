"""Options of one request. The API and the command line share their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar

from pydantic import BaseModel, Field, ValidationError

from edgekit.common.base import Frozen
from edgekit.errors import InvalidOption, quote_short
from edgekit.runtime.generation.sampling import Sampling
from edgekit.runtime.generation.schemas import require_all
from edgekit.runtime.generation.stopping import Stopping

DraftName: TypeAlias = Literal["ngram", "early-exit", "head", "model"]
"""The name of a draft method, one of those with which the runtime was opened."""

Params = TypeVar("Params", bound=Frozen)
# What some libraries give as an option of a generation is a method here.
_METHODS = {"prompt_logprobs": "prompt_logprobs", "echo": "prompt_logprobs", "embeddings": "embed", "embed": "embed"}


class Options(TypedDict, total=False):
    """Keyword options of `generate`, `chat`, `complete`, `stream` and `submit`."""

    temperature: float
    """0 (the default) takes the likeliest token; above, tokens are drawn."""
    top_k: int | None
    """Draw among this many likeliest tokens."""
    top_p: float | None
    """Draw among the fewest tokens that have this much probability together."""
    min_p: float | None
    """Draw among tokens with at least this share of the likeliest token's probability."""
    typical_p: float | None
    """Draw among the most typical tokens that have this much probability together."""
    repetition_penalty: float
    """Divide the scores of tokens seen in prompt and answer; 1 (the default): off."""
    presence_penalty: float
    """Subtract this once from the score of every token in the answer."""
    frequency_penalty: float
    """Subtract this from the score of a token for each time it is in the answer."""
    logit_bias: dict[int, float]
    """Add this to the scores of single tokens."""
    seed: int | None
    """The same seed gives the same text; None: draw a seed, which `answer.seed` reports."""
    logprobs: int | None
    """Report each token's log probability, with this many alternatives."""
    max_tokens: int | None
    """Most tokens of the answer; None: as many as the context has room for. 0 only reads the prompt."""
    stop: str | Sequence[str]
    """End the answer before this text, or before the first of these."""
    stop_tokens: Sequence[int]
    """End the answer before any of these tokens."""
    thinking_tokens: int | None
    """Most tokens of thinking, between `<think>` and `</think>`; then its end is written. None: no limit."""
    ignore_eos: bool
    """Continue where the model would end."""
    schema: dict[str, Any] | str | type[BaseModel] | None
    """A JSON schema, or a pydantic class, that the answer follows; `answer.parsed` is the value or the instance."""
    regex: str | None
    """A regular expression that the whole answer matches."""
    grammar: str | None
    """A grammar in Lark's or llama.cpp's notation that the answer follows."""
    priority: int
    """From -100 to 100; a higher one runs earlier. One step is worth ten seconds of waiting."""
    tenant: str
    """Cached prompts are shared only within a tenant."""
    context: int | None
    """Most tokens that this request keeps in its cache."""
    window: int | None
    """Keep the first `sinks` and the newest tokens, this many in all."""
    sinks: int
    """First tokens that a window never drops."""
    keep: str | None
    """The tokens that a window keeps in addition to the sinks: `newest` (the default), or `scored`."""
    drafting: bool | DraftName
    """False: no drafts; a name: this drafter of the runtime only."""
    adapter: str | None
    """A loaded adapter."""


class SchedulingParams(Frozen):
    """The priority, the tenant and the adapter of a request."""

    priority: int = Field(default=0, ge=-100, le=100)
    tenant: str = Field(default="", max_length=256)
    adapter: str | None = Field(default=None, max_length=64)


class CacheLimits(Frozen):
    """The KV cache of one request, within the runtime's own, and its drafter."""

    context: int | None = Field(default=None, ge=2)
    window: int | None = Field(default=None, ge=2)
    sinks: int = Field(default=0, ge=0)
    keep: str | None = Field(default=None, max_length=64)
    drafting: bool | DraftName = True


class ResponseFormat(Frozen):
    """The form of the answer; at most one of the three."""

    schema_: dict[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None

    @property
    def given(self) -> tuple[str, Any] | None:
        """The name and the value of the given format; None without one."""
        pairs = (("schema", self.schema_), ("regex", self.regex), ("grammar", self.grammar))
        given = [(name, value) for name, value in pairs if value is not None]
        if len(given) > 1:
            raise InvalidOption(f"{' and '.join(name for name, _ in given)} exclude each other; give one")
        return given[0] if given else None


class GenerationParams(NamedTuple):
    """The checked options of one request."""

    sampling: Sampling
    stopping: Stopping
    response_format: ResponseFormat
    scheduling: SchedulingParams
    cache_limits: CacheLimits
    model_class: type[BaseModel] | None = None  # given as `schema`

    @staticmethod
    def parse(options: Mapping[str, Any]) -> GenerationParams:
        """Check `options`; InvalidOption for an unknown name or a value out of bounds."""
        for name in options:
            if name not in Options.__annotations__:
                if name in _METHODS:
                    raise InvalidOption(f"unknown option {name}; it is a method: runtime.{_METHODS[name]}")
                near = get_close_matches(name, Options.__annotations__, n=1)
                fix = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(Options.__annotations__))}"
                raise InvalidOption(f"unknown option {quote_short(name)}; {fix}")
        values, model_class = dict(options), None
        if isinstance(values.get("stop"), str):
            values["stop"] = (values["stop"],)
        schema = values.pop("schema", None)
        if isinstance(schema, type) and issubclass(schema, BaseModel):
            model_class, schema = schema, require_all(schema.model_json_schema())
        values["schema_"] = schema
        return GenerationParams(
            _checked(Sampling, values),
            _checked(Stopping, values),
            _checked(ResponseFormat, values),
            _checked(SchedulingParams, values),
            _checked(CacheLimits, values),
            model_class,
        )


def _checked(params: type[Params], values: Mapping[str, Any]) -> Params:
    try:
        return params(**{name: value for name, value in values.items() if name in params.model_fields})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part).removesuffix("_") for part in first["loc"])
        if where.startswith("schema."):
            raise InvalidOption(
                "schema: must be a JSON schema (an object, or its text) or a pydantic class, "
                f"found {quote_short(first['input'])}"
            ) from error
        raise InvalidOption(f"{where}: {first['msg']} (found {quote_short(first['input'])})") from error
