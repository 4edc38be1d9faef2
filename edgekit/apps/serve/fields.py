"""Fields that several APIs share, and their translation into options of a request. None is the same as absent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from edgekit.apps.serve.problems import ApiError, invalid, not_offered
from edgekit.common.bounds import MAX_SEED

MOST_CHOICES = 8


def _integral(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_integral)
"""JSON may write a whole number as 1.0. Stands after the bounds of an int, which the described API has only there."""
Name = Annotated[str, Field(max_length=256)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Bias = Annotated[Real, Field(ge=-100, le=100)]
_NO_OTHERS = {"additionalProperties": False}  # which the pattern of keys alone does not say
StopText = Annotated[str, Field(max_length=1024)]
TokenLimit = Annotated[int, Field(ge=1, le=1 << 31), WHOLE]
TokenText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
TokenNumber = Annotated[int, Field(ge=0), WHOLE]
# Fields that are the runtime's options.
_AS_THEY_ARE = {"temperature", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty", "ignore_eos"}
_WITHOUT_EFFECT = "without effect"
_MOST_IGNORED = 32  # names of fields that a response lists
WithoutEffect = Annotated[JsonValue, _WITHOUT_EFFECT]
"""A field that clients send and that has no effect; a header of the response names it."""


class ApiFields(BaseModel):
    """The base of every body: strict about types, tolerant of unknown fields."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", protected_namespaces=())

    def without_effect(self) -> list[str]:
        """Return the given fields that are known and have no effect."""
        fields = type(self).model_fields
        given = [name for name in sorted(self.model_fields_set) if getattr(self, name) is not None]
        return [name for name in given if name in fields and _WITHOUT_EFFECT in fields[name].metadata]

    def ignored(self) -> list[str]:
        """Return the given fields that are unknown or have no effect, with dots before the fields of parts."""
        found, waiting = dict[str, None](), list[tuple[str, Any]]([("", self)])
        while waiting and len(found) < _MOST_IGNORED:
            path, value = waiting.pop(0)
            if isinstance(value, ApiFields):
                names = [*sorted(value.model_extra or {}), *value.without_effect()]
                found |= dict.fromkeys(f"{path}{name}" for name in names)
                known = [name for name in type(value).model_fields if name in value.model_fields_set]
                waiting += [(f"{path}{name}.", getattr(value, name)) for name in known]
            elif isinstance(value, list):
                waiting += [(path, each) for each in value if isinstance(each, ApiFields | list)]
        return list(found)

    def names_tokens(self) -> bool:
        """Return True if the body has token ids, which mean something else to another model."""
        named = (getattr(self, name, None) for name in ("logit_bias", "stop_token_ids"))
        return any(named) or bool(getattr(getattr(self, "edgekit", None), "stop_tokens", None))


class OwnFields(ApiFields):
    """Options that a request may set under `edgekit`, in addition to the fields of its API."""

    model_config = ConfigDict(extra="forbid")

    @staticmethod
    def of(own: OwnFields | None) -> dict[str, Any]:
        """Return the given options."""
        return own.model_dump(exclude_none=True) if own else {}


class OwnOptions(OwnFields):
    """Options of an answer."""

    top_k: Annotated[int, Field(ge=1, le=1 << 20), WHOLE] | None = None
    min_p: Annotated[Real, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[Real, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[Real, Field(ge=0.01, le=10)] | None = None
    ignore_eos: bool | None = None
    stop_tokens: Annotated[list[TokenNumber], Field(max_length=256)] | None = None
    regex: str | None = None
    grammar: str | None = None
    drafting: bool | Literal["ngram", "early-exit", "head", "model"] | None = None
    context: Annotated[int, Field(ge=2), WHOLE] | None = None
    window: Annotated[int, Field(ge=2), WHOLE] | None = None
    sinks: Annotated[int, Field(ge=0), WHOLE] | None = None
    keep: Annotated[str, Field(max_length=64)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED), WHOLE] | None = None  # for APIs without such a field
    thinking_tokens: Annotated[int, Field(ge=0, le=1 << 31), WHOLE] | None = None


class SamplingFields(ApiFields):
    """The fields of all of OpenAI's endpoints that generate text."""

    model: Name | None = None
    temperature: Annotated[Real, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Real, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE] | None = None
    presence_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[TokenText, Bias], Field(max_length=1024, json_schema_extra=_NO_OTHERS)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES), WHOLE] | None = None
    stream: bool | None = None
    stream_options: dict[str, JsonValue] | None = None
    # Not OpenAI's, but widely used:
    top_k: Annotated[int, Field(ge=-1, le=1 << 20), WHOLE] | None = None
    min_p: Annotated[Real, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Real, Field(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenNumber], Field(max_length=256)] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=1 << 31), WHOLE] | None = None
    edgekit: OwnOptions | None = None

    user: WithoutEffect = None
    metadata: WithoutEffect = None
    store: WithoutEffect = None
    service_tier: WithoutEffect = None
    safety_identifier: WithoutEffect = None
    prompt_cache_key: WithoutEffect = None
    prompt_cache_retention: WithoutEffect = None
    prediction: WithoutEffect = None

    @property
    def choices(self) -> int:
        """The requested number of answers."""
        return self.n or 1

    @property
    def reports_usage(self) -> bool:
        """True where a stream ends with its token counts."""
        return bool((self.stream_options or {}).get("include_usage"))

    def sampling(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the runtime options; `defaults` apply if the body has neither temperature nor top_p."""
        given: dict[str, Any] = dict(defaults) if self.temperature is None and self.top_p is None else {}
        if not given and self.temperature is None:
            given["temperature"] = 1.0
        given |= self.model_dump(include=_AS_THEY_ARE, exclude_none=True)
        if self.top_p == 0:
            given["temperature"] = 0.0  # only the likeliest token remains
        elif self.top_p is not None:
            given["top_p"] = self.top_p
        if self.top_k is not None and self.top_k > 0:  # 0 and -1 mean no limit
            given["top_k"] = self.top_k
        if self.seed is not None and self.seed != -1:
            given["seed"] = self.seed & MAX_SEED
        if self.logit_bias:
            given["logit_bias"] = {int(token): value for token, value in self.logit_bias.items()}
        if self.thinking_token_budget is not None:
            given["thinking_tokens"] = self.thinking_token_budget
        if self.stop_token_ids:
            given["stop_tokens"] = self.stop_token_ids
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if stops := list(dict.fromkeys(stop for stop in stops if stop)):
            given["stop"] = stops
        return given | OwnFields.of(self.edgekit)


def listed(given: Any) -> list[str | list[int]]:
    """Return every text of a field. A list of numbers is one text of tokens."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


class Part(ApiFields):
    """A part of a message's content."""

    type: Name
    text: str | None = None


Content = str | Annotated[list[Part], Field(max_length=1024)] | None
_TEXT = frozenset({"text", "input_text", "output_text", "refusal"})


def text_of(content: str | Sequence[Part] | None, param: str) -> str | None:
    """Return the text of a message's content; other kinds of parts are refused."""
    if content is None or isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type not in _TEXT:
            raise not_offered(f"parts of type {part.type[:40]!r} cannot be read by this model", f"{param}.{index}.type")
    return "".join(part.text or "" for part in content)


def arguments_of(text: str, param: str) -> dict[str, Any]:
    """Parse the arguments of a call in a conversation, which templates expect as an object."""
    try:
        value = json.loads(text or "{}", parse_constant=_refused)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise invalid(f"{param}: must be the text of a JSON object", param)
    return value


def _refused(name: str) -> float:
    raise ValueError(name)


def joined_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join the first `system` and `developer` messages into one, because many templates refuse a second one."""
    texts: list[str] = []
    rest = list(messages)
    while rest and rest[0]["role"] in ("system", "developer"):
        texts.append(rest.pop(0).get("content") or "")
    first = [{"role": "system", "content": "\n\n".join(text for text in texts if text)}] if any(texts) else []
    return [*first, *({**each, "role": "system"} if each["role"] == "developer" else dict(each) for each in rest)]


def refuse(body: BaseModel, fields: Mapping[str, str]) -> None:
    """Refuse given fields that are not supported. `fields`: the reason or alternative of every such field."""
    for name, reason in fields.items():
        if (body.model_extra or {}).get(name) not in (None, False, [], {}, ""):
            raise not_offered(reason, name)


def no_choice(name: str, known: Sequence[str]) -> ApiError:
    """Return the error for the choice of a tool that the request does not describe."""
    return invalid(f"tool_choice: {name[:64]!r} is not among the tools {', '.join(known)[:200]}", "tool_choice")
