"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, JsonValue

from edgekit import Piece
from edgekit.apps.serve.answering import Answers, PromptJob, TokenUsage, ask, chat_logprobs
from edgekit.apps.serve.call import Call, EventStream, event, json_response
from edgekit.apps.serve.fields import (
    WHOLE,
    ApiFields,
    Content,
    Name,
    Real,
    SamplingFields,
    TokenLimit,
    WithoutEffect,
    arguments_of,
    joined_system,
    refuse,
    text_of,
)
from edgekit.apps.serve.models import ServedModel
from edgekit.apps.serve.problems import error_content, invalid
from edgekit.apps.serve.tools import CallParts, FunctionTool, ToolPlan, plan_tools, whole_arguments

if TYPE_CHECKING:
    from starlette.responses import Response

REFUSED = {
    "audio": "this model writes text only",
    "web_search_options": "this server opens no connections",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "chat_template": "the template is the model's own",
    "suffix": "use /v1/completions",
    "echo": "use /v1/completions",
    "best_of": "use n",
    "guided_json": "use response_format",
    "add_generation_prompt": "the prompt always ends where an answer begins",
    "continue_final_message": "every answer is a new message",
}


ChoiceName = Literal["none", "auto", "required"]


class CallFunction(ApiFields):
    """The function of a call in a conversation."""

    name: Name
    arguments: str = "{}"


class MessageCall(ApiFields):
    """A call in a conversation."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: CallFunction


class ChatMessage(ApiFields):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: Name | None = None
    tool_calls: Annotated[list[MessageCall], Field(max_length=128)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    def plain(self, place: int) -> dict[str, Any]:
        """Return the message as chat templates expect it."""
        param = f"messages.{place}"
        message: dict[str, Any] = {"role": self.role, "content": text_of(self.content, f"{param}.content")}
        if message["content"] is None and not self.tool_calls:
            raise invalid(f"{param}.content: is missing", f"{param}.content")
        if self.role == "tool" and self.tool_call_id is None:
            raise invalid(f"{param}.tool_call_id: is missing", f"{param}.tool_call_id")
        if self.tool_calls:
            message["content"] = message["content"] or ""
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": arguments_of(call.function.arguments, f"{param}.tool_calls"),
                    },
                }
                for call in self.tool_calls
            ]
        named = {"name": self.name, "tool_call_id": self.tool_call_id}
        reasoning = self.reasoning_content or self.reasoning
        return message | {key: value for key, value in {**named, "reasoning": reasoning}.items() if value is not None}


class NamedFunction(ApiFields):
    """The name of a function."""

    name: Name


class ChatTool(ApiFields):
    """A tool in OpenAI's form."""

    type: Literal["function"]
    function: FunctionTool


class ToolChoice(ApiFields):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(ApiFields):
    """The tools that may be called, or of which one must be."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ToolChoice | NamedFunction], Field(max_length=128)]


class AllowedChoice(ApiFields):
    """A part of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class JsonSchema(ApiFields):
    """A named schema."""

    name: Name = "answer"
    schema_: dict[str, JsonValue] = Field(alias="schema")
    strict: bool | None = None
    description: str | None = None


class NamedForm(JsonSchema):
    """An answer that follows a named schema."""

    type: Literal["json_schema"]


class PlainForm(ApiFields):
    """An answer that is a text, or an object of JSON."""

    type: Literal["text", "json_object"]
    schema_: dict[str, JsonValue] | None = Field(default=None, alias="schema")


class SchemaForm(ApiFields):
    """An answer that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


def form_option(form: PlainForm | SchemaForm | NamedForm | None) -> dict[str, Any]:
    """Return the runtime option for the form of an answer."""
    if form is None or form.type == "text":
        return {}
    found = form.json_schema.schema_ if isinstance(form, SchemaForm) else form.schema_
    return {"schema": found or {"type": "object", "additionalProperties": True}}


class ChatBody(SamplingFields):
    """The body of a chat completion."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: TokenLimit | None = None
    max_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    response_format: Annotated[PlainForm | SchemaForm, Field(discriminator="type")] | None = None
    tools: Annotated[list[ChatTool], Field(max_length=128)] | None = None
    tool_choice: ChoiceName | ToolChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=16)] | None = None
    chat_template_kwargs: Annotated[dict[str, str | bool | int | Real], Field(max_length=32)] | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: WithoutEffect = None

    def planned_tools(self) -> ToolPlan:
        """Return the tools for the template, and the schema of the call if the answer must be one."""
        tools = [tool.function for tool in self.tools or ()]
        given = self.tool_choice or "auto"
        if isinstance(given, AllowedChoice):
            listed = given.allowed_tools.tools
            names = {each.function.name if isinstance(each, ToolChoice) else each.name for each in listed}
            tools, given = [tool for tool in tools if tool.name in names], given.allowed_tools.mode
        choice = f"function:{given.function.name}" if isinstance(given, ToolChoice) else given
        return plan_tools(tools, choice, parallel=self.parallel_tool_calls is not False)

    def template_options(self) -> dict[str, Any]:
        """Return variables for the chat template."""
        given = self.chat_template_kwargs or {}
        if self.reasoning_effort == "none":
            return {"enable_thinking": False, **given}
        return {"reasoning_effort": self.reasoning_effort, **given} if self.reasoning_effort else given


async def chat_completions(call: Call) -> Response | EventStream:
    """Answer a conversation."""
    body = await call.body(ChatBody)
    refuse(body, REFUSED)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs: needs logprobs", "top_logprobs")
    model = await call.model(body.model)
    plan = body.planned_tools()
    options = body.sampling(call.service.models.default_sampling(model))
    options["max_tokens"] = body.max_completion_tokens or body.max_tokens
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    form = form_option(body.response_format)
    if plan.is_forced and form:
        raise invalid("response_format: the answer is a call; leave out one of tool_choice and it", "response_format")
    options |= {"schema": plan.schema} if plan.is_forced else form
    messages = joined_system([message.plain(index) for index, message in enumerate(body.messages)])
    asked = PromptJob(messages, options, body.choices, plan.described, body.template_options() or None)
    answers = await ask(call, model, asked)
    writer = ChatWriter(model, answers, plan, asks_logprobs=bool(body.logprobs), reports_usage=body.reports_usage)
    if body.stream:
        return EventStream(call, writer.events(), lambda error: event(error_content(error, "openai", call.id)))
    return json_response(await writer.whole(asked.answers))


class ChatWriter:
    """Writes pieces as chunks of a stream. A whole answer is the sum of its chunks."""

    def __init__(
        self, model: ServedModel, answers: Answers, plan: ToolPlan, *, asks_logprobs: bool, reports_usage: bool
    ) -> None:
        self._model, self._answers, self._plan = model, answers, plan
        self._asks_logprobs, self._reports_usage = asks_logprobs, reports_usage
        self._frame = frame_of(model, "chatcmpl", "chat.completion.chunk")

    async def choices(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the choice of each chunk."""
        begun = set[int]()
        calls = defaultdict[int, CallParts](lambda: CallParts(self._plan.most_calls))
        async for place, piece in self._answers.pieces():
            if place not in begun:
                begun.add(place)
                yield _choice(place, {"role": "assistant", "content": ""})
            delta = self._delta(piece)
            logprobs = (
                chat_logprobs(self._model, piece.logprobs) if self._asks_logprobs and not piece.reasoning else None
            )
            if delta or logprobs:
                yield _choice(place, delta, {"content": logprobs, "refusal": None} if logprobs is not None else None)
            for part in calls[place].of(piece):
                if part.name is not None:
                    begin = {"index": part.place, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
                    function = {"name": part.name, "arguments": ""}
                    yield _choice(place, {"tool_calls": [{**begin, "function": function}]})
                more = {"index": part.place, "function": {"arguments": part.arguments}}
                yield _choice(place, {"tool_calls": [more]})
            if calls[place].is_enough(piece):
                self._answers.cancel(place)
            if piece.finish_reason is not None:
                yield _choice(place, {}) | {"finish_reason": piece.finish_reason}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.content and not self._plan.is_forced:
            delta["content"] = piece.content
        if piece.reasoning:
            delta |= {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning}
        return delta

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream: chunks, token counts if requested, and the end mark."""
        usage = (lambda: usage_content(self._answers.usage)) if self._reports_usage else None
        async for chunk in chunks(self._frame, self.choices(), usage):
            yield chunk

    async def whole(self, count: int) -> dict[str, Any]:
        """The whole answer."""
        joined = [_Joined(index) for index in range(count)]
        async for choice in self.choices():
            joined[choice["index"]].add(choice)
        return {
            **self._frame,
            "object": "chat.completion",
            "choices": [each.content() for each in joined],
            "usage": usage_content(self._answers.usage),
        }


class _Joined:
    """One choice, joined from its chunks."""

    def __init__(self, place: int) -> None:
        self._place, self._content, self._reasoning = place, "", ""
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] | None = None
        self._finish_reason: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        delta = choice["delta"]
        self._content += delta.get("content", "")
        self._reasoning += delta.get("reasoning_content", "")
        for each in delta.get("tool_calls", ()):
            if "id" in each:
                self._calls.append({key: each[key] for key in ("id", "type", "function")})
            else:
                self._calls[each["index"]]["function"]["arguments"] += each["function"]["arguments"]
        if choice["logprobs"] is not None:
            self._logprobs = [*(self._logprobs or ()), *choice["logprobs"]["content"]]
        self._finish_reason = choice["finish_reason"]

    def content(self) -> dict[str, Any]:
        # An incomplete call is dropped.
        self._calls = [each for each in self._calls if whole_arguments(each["function"]["arguments"]) is not None]
        has_text = bool(self._content) or not self._calls
        message: dict[str, Any] = {"role": "assistant", "content": self._content if has_text else None, "refusal": None}
        if self._calls:
            message["tool_calls"] = self._calls
        if self._reasoning:
            message |= {"reasoning_content": self._reasoning, "reasoning": self._reasoning}
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        return {"index": self._place, "message": message, "logprobs": logprobs, "finish_reason": self._finish_reason}


def _choice(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def frame_of(model: ServedModel, prefix: str, kind: str) -> dict[str, Any]:
    """Return the fields that every chunk of an answer has, with a new id."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": model.fingerprint,
    }


async def chunks(
    frame: dict[str, Any], choices: AsyncIterator[dict[str, Any]], usage: Callable[[], dict[str, Any]] | None
) -> AsyncIterator[bytes]:
    """Yield a stream in OpenAI's form: a chunk for each choice, the token counts if asked for, and the end mark."""
    no_usage = {"usage": None} if usage else {}
    async for choice in choices:
        yield event({**frame, "choices": [choice], **no_usage})
    if usage:
        yield event({**frame, "choices": [], "usage": usage()})
    yield b"data: [DONE]\n\n"


def usage_content(usage: TokenUsage) -> dict[str, Any]:
    """Return token counts in OpenAI's form."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
