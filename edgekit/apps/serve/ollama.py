"""`/api/`: the part of Ollama's API for chats, generation and listing, for clients of Ollama. Off by default."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, JsonValue
from starlette.responses import PlainTextResponse

from edgekit.apps.serve.answering import Answers, PromptJob, ask
from edgekit.apps.serve.call import Call, EventStream, json_response
from edgekit.apps.serve.chat import ChatTool
from edgekit.apps.serve.fields import ApiFields, Name, joined_system, refuse
from edgekit.apps.serve.models import ServedModel
from edgekit.apps.serve.problems import ApiError, as_json, invalid
from edgekit.apps.serve.tools import plan_tools
from edgekit.common.bounds import MAX_SEED

if TYPE_CHECKING:
    from starlette.responses import Response

    from edgekit import Piece

VERSION = "0.13.0"  # clients look for a recent one
# Ollama's name of an option → ours.
_OPTIONS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "typical_p": "typical_p",
    "repeat_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "seed": "seed", "stop": "stop", "num_predict": "max_tokens",
}  # fmt: skip
_REFUSED = {
    "images": "this model reads text only",
    "template": "the template is the model's own",
    "suffix": "filling in the middle is not offered",
    "logprobs": "use /v1/chat/completions",
}
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h)?")
_DURATION = re.compile(rf"[+-]?(?:{_PART.pattern}){{1,4}}")
_NDJSON = "application/x-ndjson"


class OllamaCall(ApiFields):
    """A call in a conversation; its arguments are an object."""

    function: dict[str, JsonValue]


class OllamaMessage(ApiFields):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: Name | None = None
    images: JsonValue = None

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates expect it."""
        if self.images:
            raise invalid("images: this model reads text only", "images")
        calls = [{"type": "function", "function": each.function} for each in self.tool_calls or ()]
        more = {"tool_calls": calls or None, "name": self.tool_name, "reasoning": self.thinking}
        return {"role": self.role, "content": self.content, **{key: value for key, value in more.items() if value}}


class OllamaBody(ApiFields):
    """The fields that all bodies share."""

    model: Name
    stream: bool | None = None
    format: Literal["json", ""] | dict[str, JsonValue] | None = None
    options: dict[str, JsonValue] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: int | float | str | None = None

    async def model_of(self, call: Call) -> ServedModel:
        """Return the model, opened. It stays open for `keep_alive` after its last answer."""
        keep_alive_s = None if self.keep_alive is None else _seconds(self.keep_alive)
        model = await call.model(find(call, self.model).name)
        if keep_alive_s is not None:
            model.model.keep_alive_s = keep_alive_s
        return model

    def sampling(self, call: Call, model: ServedModel) -> dict[str, Any]:
        """Return the runtime options; Ollama's other options are reported as ignored."""
        given = {name: value for name, value in (self.options or {}).items() if value is not None}
        call.ignore("x-edgekit-ignored", [f"options.{name}" for name in given if name not in _OPTIONS])
        found: dict[str, Any] = {_OPTIONS[name]: value for name, value in given.items() if name in _OPTIONS}
        for name, value in found.items():
            if name in _REAL and type(value) is int:
                found[name] = _real(value, f"options.{name}")
            elif name in _WHOLE and isinstance(value, float) and value.is_integer():
                found[name] = int(value)
        if isinstance(most := found.get("top_k"), int) and most <= 0:
            del found["top_k"]  # no limit
        if isinstance(seed := found.pop("seed", None), int) and seed >= 0:
            found["seed"] = seed & MAX_SEED
        if isinstance(most := found.get("max_tokens"), int) and most < 0:
            del found["max_tokens"]
        if self.format:
            found["schema"] = _ANY_OBJECT if self.format == "json" else self.format
        return {**call.service.models.default_sampling(model), **found}

    def thinking(self) -> dict[str, Any] | None:
        """Return variables of the chat template."""
        if self.think is None:
            return None
        return {"enable_thinking" if isinstance(self.think, bool) else "reasoning_effort": self.think}


_REAL = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_WHOLE = ("max_tokens", "top_k", "seed")
_ANY_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}


class OllamaChat(OllamaBody):
    """The body of a chat."""

    messages: Annotated[list[OllamaMessage], Field(max_length=4096)] = Field(default_factory=list)
    tools: Annotated[list[ChatTool], Field(max_length=128)] | None = None


class OllamaGenerate(OllamaBody):
    """The body of a generation."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    context: JsonValue = None


def find(call: Call, name: str) -> ServedModel:
    """Return the model called `name`, which may end in `:latest`, as Ollama's clients send it."""
    try:
        return call.service.models.find(name)
    except ApiError:
        if name.endswith(":latest"):
            return call.service.models.find(name.removesuffix(":latest"))
        raise ApiError(404, f"model '{name[:64]}' not found, /api/tags lists what is served") from None


async def chat(call: Call) -> Response | EventStream:
    """Answer a conversation."""
    body = await call.body(OllamaChat)
    refuse(body, _REFUSED)
    model = await body.model_of(call)
    if not body.messages:
        return _loaded(model, body, {"message": {"role": "assistant", "content": ""}})
    plan = plan_tools([tool.function for tool in body.tools or ()], "auto")
    messages = joined_system([message.plain() for message in body.messages])
    asked = PromptJob(messages, body.sampling(call, model), 1, plan.described, body.thinking())
    return await _answer(call, body, LineWriter(model, await ask(call, model, asked), "message"))


async def generate(call: Call) -> Response | EventStream:
    """Continue a prompt, as one message of a chat unless it is `raw`."""
    body = await call.body(OllamaGenerate)
    refuse(body, _REFUSED)
    model = await body.model_of(call)
    if not body.prompt:
        return _loaded(model, body, {"response": ""})
    if body.context is not None:
        raise invalid("context: send the text instead", "context")
    is_chat = not body.raw and model.template.exists
    system = [{"role": "system", "content": body.system}] if body.system else []
    prompt = [*system, {"role": "user", "content": body.prompt}] if is_chat else body.prompt
    options = body.sampling(call, model)
    asked = PromptJob(prompt, options, 1, None, body.thinking() if is_chat else None)
    return await _answer(call, body, LineWriter(model, await ask(call, model, asked), "response"))


async def _answer(call: Call, body: OllamaBody, writer: LineWriter) -> Response | EventStream:
    if body.stream is False:
        return json_response(await writer.whole())
    return EventStream(
        call, writer.stream(), lambda error: as_json({"error": error.message}) + b"\n", ping=b"", media_type=_NDJSON
    )


def _loaded(model: ServedModel, body: OllamaBody, empty: Mapping[str, Any]) -> Response:
    """Return the response to a request without a prompt, which only opens the model or closes it."""
    reason = "unload" if model.model.keep_alive_s == 0 and body.keep_alive is not None else "load"
    return json_response({"model": model.name, "created_at": _now(), **empty, "done": True, "done_reason": reason})


def _seconds(keep_alive: float | str) -> float:
    """Return the seconds of a number or of a text such as `1h30m`. Negative: for ever."""
    if not isinstance(keep_alive, str):
        return _real(keep_alive, "keep_alive")
    if not _DURATION.fullmatch(keep_alive):
        raise invalid("keep_alive: must be seconds, or a text such as 10m", "keep_alive")
    sign = -1.0 if keep_alive.startswith("-") else 1.0
    return sign * sum(float(number) * _UNITS_S[unit or "s"] for number, unit in _PART.findall(keep_alive))


def _real(value: float, param: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise invalid(f"{param}: is too large", param) from None


class LineWriter:
    """Writes pieces as lines of JSON."""

    def __init__(self, model: ServedModel, answers: Answers, field: Literal["message", "response"]) -> None:
        self._model, self._answers, self._field = model, answers, field

    async def lines(self) -> AsyncIterator[dict[str, Any]]:
        """Yield every line; the last one has the token counts."""
        async for _, piece in self._answers.pieces():
            if piece.content or piece.reasoning or piece.tool_calls:
                yield {**self._frame(), **self._text(piece), "done": False}
            if piece.timings is not None:
                times = piece.timings
                empty = (
                    {"message": {"role": "assistant", "content": ""}} if self._field == "message" else {"response": ""}
                )
                yield {
                    **self._frame(),
                    **empty,
                    "done": True,
                    "done_reason": "length" if piece.finish_reason == "length" else "stop",
                    "total_duration": _ns(times.total_s),
                    "load_duration": 0,
                    "prompt_eval_count": times.prompt_tokens,
                    "prompt_eval_duration": _ns(times.prefill_s),
                    "eval_count": times.tokens,
                    "eval_duration": _ns(times.decode_s),
                }

    def _frame(self) -> dict[str, Any]:
        return {"model": self._model.name, "created_at": _now()}

    def _text(self, piece: Piece) -> dict[str, Any]:
        thinking = {"thinking": piece.reasoning} if piece.reasoning else {}
        if self._field == "response":
            return {"response": piece.content, **thinking}
        calls = [
            {"id": f"call_{secrets.token_hex(12)}", "function": {"name": each.name, "arguments": each.arguments}}
            for each in piece.tool_calls
        ]
        more = {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": piece.content, **thinking, **more}}

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the lines as bytes."""
        async for line in self.lines():
            yield as_json(line) + b"\n"

    async def whole(self) -> dict[str, Any]:
        """Return one object: the last line with the text of all lines."""
        lines = [line async for line in self.lines()]
        joined = dict(lines[-1])
        if self._field == "response":
            thinking = "".join(line.get("thinking", "") for line in lines)
            joined |= {"response": "".join(line["response"] for line in lines)}
            return joined | ({"thinking": thinking} if thinking else {})
        messages = [line["message"] for line in lines]
        calls = [each for message in messages for each in message.get("tool_calls", ())]
        thinking = "".join(message.get("thinking", "") for message in messages)
        message = {"role": "assistant", "content": "".join(each["content"] for each in messages)}
        more = {"tool_calls": calls, "thinking": thinking}
        return joined | {"message": message | {key: value for key, value in more.items() if value}}


async def tags(call: Call) -> Response:
    """List every model."""
    models = call.service.models
    return json_response({"models": [_tag(models.find(name)) for name in models.names()]})


async def running(call: Call) -> Response:
    """List every model in memory."""
    models = call.service.models
    found = [each for each in map(models.find, models.names()) if each.model.state == "ready"]
    more = [{"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0, "context_length": each.context} for each in found]
    return json_response({"models": [{**_tag(each), **extra} for each, extra in zip(found, more, strict=True)]})


async def show(call: Call) -> Response:
    """Describe one model."""

    class ShowBody(ApiFields):
        model: Name

    model = find(call, (await call.body(ShowBody)).model)
    template = model.template
    return json_response(
        {
            "details": _tag(model)["details"],
            "template": template.source or "",
            "capabilities": _capabilities(model),
            "model_info": {"general.architecture": "edgekit", "edgekit.context_length": model.context},
        }
    )


def _capabilities(model: ServedModel) -> list[str]:
    plan = model.model.artifact.plan if model.model.artifact else None
    embeds = ["embedding"] if plan and plan.model.embedding else []
    if not model.writes_text:
        return ["embedding"]
    return ["completion", *(["tools"] if model.template.exists else []), *embeds]


def _tag(model: ServedModel) -> dict[str, Any]:
    artifact = model.model.artifact
    plan = artifact.plan if artifact else None
    details = {
        "parent_model": "",
        "format": plan.target if plan else "",
        "family": plan.model.family if plan else "",
        "families": [plan.model.family] if plan else [],
        "parameter_size": "",
        "quantization_level": plan.recipe.name if plan else "",
    }
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _now(),
        "size": plan.estimate.total_bytes if plan else 0,
        "digest": artifact.sha256 if artifact else "",
        "details": details,
    }


async def version(call: Call) -> Response:
    """Return the supported version of Ollama's API."""
    return json_response({"version": VERSION})


async def greeting(call: Call) -> Response:
    """Answer the root path as Ollama does, for clients that check for it."""
    return PlainTextResponse("Ollama is running")


async def not_served(call: Call) -> Response:
    """Refuse to pull, create or delete models, which only the operator may do."""
    raise ApiError(501, "this server takes models from its operator only", code="not_implemented")


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
