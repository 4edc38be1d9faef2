"""`POST /v1/responses`: OpenAI's newer API, without stored state: each request has the whole conversation."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, JsonValue

from edgekit.apps.serve.answering import Answers, PromptJob, TokenUsage, ask, chat_logprobs
from edgekit.apps.serve.call import Call, EventStream, event, json_response
from edgekit.apps.serve.chat import ChoiceName, NamedForm, NamedFunction, PlainForm, form_option
from edgekit.apps.serve.fields import (
    WHOLE,
    ApiFields,
    Content,
    Name,
    SamplingFields,
    TokenLimit,
    WithoutEffect,
    arguments_of,
    joined_system,
    refuse,
    text_of,
)
from edgekit.apps.serve.models import ServedModel
from edgekit.apps.serve.problems import ApiError, invalid
from edgekit.apps.serve.tools import CallPart, CallParts, FunctionTool, ToolPlan, plan_tools, whole_arguments

if TYPE_CHECKING:
    from starlette.responses import Response

    from edgekit import Piece

REFUSED = {
    "background": "answers are made while the client waits",
    "conversation": "nothing is stored",
    "prompt": "there are no stored prompts",
    "context_management": "send the whole conversation",
}
_LOGPROBS = "message.output_text.logprobs"
# Fields of the request that the response repeats.
_ECHOED = (
    "instructions",
    "metadata",
    "temperature",
    "top_p",
    "max_output_tokens",
    "parallel_tool_calls",
    "tool_choice",
    "text",
    "tools",
    "reasoning",
)


class TextForm(ApiFields):
    """The form of the text."""

    format: Annotated[PlainForm | NamedForm, Field(discriminator="type")] | None = None
    verbosity: WithoutEffect = None


class FunctionChoice(NamedFunction):
    """The function that must be called."""

    type: Literal["function"]


class InputItem(ApiFields):
    """An item of a conversation."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content = None
    name: Name | None = None
    arguments: str | None = None
    call_id: Name | None = None
    output: Content = None

    def plain(self, param: str) -> dict[str, Any] | None:
        """Return the item as a message for chat templates; None for reasoning of earlier turns."""
        if self.type == "message":
            role = _given(self.role, f"{param}.role")
            return {"role": role, "content": text_of(self.content, f"{param}.content") or ""}
        if self.type == "function_call":
            arguments = arguments_of(self.arguments or "{}", f"{param}.arguments")
            function = {"name": _given(self.name, f"{param}.name"), "arguments": arguments}
            call = {"id": self.call_id or "", "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.type == "function_call_output":
            output = text_of(self.output, f"{param}.output") or ""
            return {"role": "tool", "tool_call_id": self.call_id or "", "content": output}
        return None


def _given(value: str | None, param: str) -> str:
    if value is None:
        raise invalid(f"{param}: is missing", param)
    return value


class ResponseTool(ApiFields):
    """A tool. The model is offered functions; all others are left out."""

    type: Name
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: WithoutEffect = None


class ResponseTools(ResponseTool):
    """A tool, or a namespace of tools."""

    tools: Annotated[list[ResponseTool], Field(max_length=256)] | None = None


class Reasoning(ApiFields):
    """How long the model may think."""

    effort: Name | None = None
    summary: WithoutEffect = None


class ResponseBody(SamplingFields):
    """The body of a response."""

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    tools: Annotated[list[ResponseTools], Field(max_length=256)] | None = None
    tool_choice: ChoiceName | FunctionChoice | None = None
    n: Annotated[int, Field(ge=1, le=1), WHOLE] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: TokenLimit | None = None
    max_tool_calls: WithoutEffect = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    text: TextForm | None = None
    reasoning: Reasoning | None = None
    include: list[Name] | None = None
    previous_response_id: Name | None = None
    truncation: WithoutEffect = None  # a conversation that is too long is refused
    metadata: dict[Name, Annotated[str, Field(max_length=512)]] | None = None  # type: ignore[assignment]  # echoed

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation as chat templates expect it."""
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*first, {"role": "user", "content": self.input}]
        messages = [each for index, item in enumerate(self.input) if (each := item.plain(f"input.{index}"))]
        if not messages:
            raise invalid("input: holds no message", "input")
        return joined_system([*first, *_calls_joined(messages)])

    def planned_tools(self) -> tuple[ToolPlan, list[str]]:
        """Return the plan for tools that are functions, and the types of all other tools, which are left out."""
        groups = (tool.tools or [] if tool.type == "namespace" else [tool] for tool in self.tools or ())
        offered = [tool for group in groups for tool in group]
        functions = [
            FunctionTool.model_validate(tool.model_dump(exclude_unset=True, exclude={"strict", "tools"}))
            for tool in offered
            if tool.type == "function"
        ]
        ignored = [tool.type for tool in offered if tool.type != "function"]
        choice = self.tool_choice or "auto"
        name = f"function:{choice.name}" if isinstance(choice, FunctionChoice) else choice
        return plan_tools(functions, name, parallel=self.parallel_tool_calls is not False), ignored


def _calls_joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join successive calls into one message."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if "tool_calls" in message and last.get("role") == "assistant":
            joined[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), *message["tool_calls"]]}
        else:
            joined.append(message)
    return joined


async def responses(call: Call) -> Response | EventStream:
    """Answer a conversation of items."""
    body = await call.body(ResponseBody)
    refuse(body, REFUSED)
    if body.previous_response_id is not None:
        raise ApiError(
            404, "nothing is stored here; send the whole conversation",
            code="previous_response_not_found", param="previous_response_id",
        )  # fmt: skip
    model = await call.model(body.model)
    plan, ignored = body.planned_tools()
    call.ignore("x-edgekit-ignored-tools", ignored)
    options = body.sampling(call.service.models.default_sampling(model))
    options["max_tokens"] = body.max_output_tokens
    asks_logprobs = body.top_logprobs is not None or _LOGPROBS in (body.include or ())
    if asks_logprobs:
        options["logprobs"] = body.top_logprobs or 0
    form = form_option(body.text.format if body.text else None)
    if plan.is_forced and form:
        call.ignore("x-edgekit-ignored", ["text.format"])  # the answer is a call
    unread = [each for each in body.include or () if each != _LOGPROBS]
    call.ignore("x-edgekit-ignored", [f"include.{each}" for each in unread])
    options |= {"schema": plan.schema} if plan.is_forced else form
    effort = body.reasoning.effort if body.reasoning else None
    thinking = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort} if effort else None
    answers = await ask(call, model, PromptJob(body.messages(), options, 1, plan.described, thinking))
    writer = ResponseWriter(model, answers, plan, body, asks_logprobs=asks_logprobs)
    if body.stream:
        return EventStream(call, writer.stream(), writer.failed)
    last: dict[str, Any] = {}
    async for each in writer.events():
        last = each
    return json_response(last["response"])


class ResponseWriter:
    """Writes pieces as the events of a response: items are opened, grow, and are closed one after the other."""

    def __init__(
        self, model: ServedModel, answers: Answers, plan: ToolPlan, body: ResponseBody, *, asks_logprobs: bool
    ) -> None:
        self._model, self._answers, self._plan, self._asks_logprobs = model, answers, plan, asks_logprobs
        self._number = 0
        self._item: dict[str, Any] | None = None  # the open item
        given = dict.fromkeys(_ECHOED) | body.model_dump(include=set(_ECHOED), by_alias=True, exclude_unset=True)
        text = given["text"] or {}
        self._response: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": model.name,
            "output": [],
            "truncation": "disabled",
            "previous_response_id": None,
            "store": False,
            "service_tier": "default",
            "top_logprobs": body.top_logprobs or 0,
            "usage": None,
            **given,
            "metadata": given["metadata"] or {},
            "tools": given["tools"] or [],
            "reasoning": given["reasoning"] or {"effort": None, "summary": None},
            "parallel_tool_calls": given["parallel_tool_calls"] is not False,
            "tool_choice": given["tool_choice"] or "auto",
            "text": {"format": text.get("format") or {"type": "text"}},
        }

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the events as bytes, and the end mark."""
        async for each in self.events():
            yield event(each, each["type"])
        yield b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> bytes:
        """Return the last event of a failed response."""
        self._response |= {"status": "failed", "error": {"code": error.code or error.type, "message": error.message}}
        return event(self._event("response.failed", response=self._response), "response.failed")

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield every event; the last one has the whole response."""
        yield self._event("response.created", response=dict(self._response))
        yield self._event("response.in_progress", response=dict(self._response))
        reason, calls = None, CallParts(self._plan.most_calls)
        async for _, piece in self._answers.pieces():
            for each in self._of_piece(piece):
                yield each
            for part in calls.of(piece):
                for each in self._call(part):
                    yield each
            if calls.is_enough(piece):
                self._answers.cancel(0)
            reason = piece.finish_reason
        for each in self._close():
            yield each
        self._response["usage"] = _usage(self._answers.usage)
        if reason == "length":
            self._response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            yield self._event("response.incomplete", response=self._response)
        else:
            self._response |= {"status": "completed", "completed_at": int(time.time())}
            yield self._event("response.completed", response=self._response)

    def _of_piece(self, piece: Piece) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if piece.reasoning:
            events += self._grown("reasoning", "reasoning_text", piece.reasoning, None)
        if piece.content and not self._plan.is_forced:
            logprobs = chat_logprobs(self._model, piece.logprobs) if self._asks_logprobs else []
            events += self._grown("message", "output_text", piece.content, logprobs)
        return events

    def _grown(self, kind: str, part: str, text: str, logprobs: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """Return the events of more text, preceded by the events that open its item if it is new."""
        events: list[dict[str, Any]] = []
        if self._item is None or self._item["type"] != kind:
            events += self._close()
            own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            self._item = {"type": kind, "id": _id(kind), "status": "in_progress", **own, "content": []}
            events.append(self._of_item("response.output_item.added", item=dict(self._item)))
            empty: dict[str, Any] = {"type": part, "text": ""}
            if kind == "message":
                empty |= {"annotations": [], "logprobs": []}
            events.append(self._of_part("response.content_part.added", part=empty))
            self._item["content"] = [dict(empty)]
        content = self._item["content"][0]
        content["text"] += text
        more: dict[str, Any] = {}
        if logprobs is not None:
            content["logprobs"] = [*content["logprobs"], *logprobs]
            more["logprobs"] = logprobs
        return [*events, self._of_part(f"response.{part}.delta", delta=text, **more)]

    def _close(self) -> list[dict[str, Any]]:
        """Return the events that end the open item."""
        item = self._item
        if item is None:
            return []
        events = self._ended_call(item) if item["type"] == "function_call" else self._ended_text(item)
        events.append(self._of_item("response.output_item.done", item=item))
        self._response["output"].append(item)
        self._item = None
        return events

    def _ended_text(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        content = item["content"][0]
        more = {"logprobs": content["logprobs"]} if item["type"] == "message" else {}
        item["status"] = "completed"
        return [
            self._of_part(f"response.{content['type']}.done", text=content["text"], **more),
            self._of_part("response.content_part.done", part=content),
        ]

    def _call(self, part: CallPart) -> list[dict[str, Any]]:
        """Return the events of a part of a call."""
        events: list[dict[str, Any]] = []
        if part.name is not None:
            events += self._close()
            named = {"call_id": f"call_{secrets.token_hex(12)}", "name": part.name}
            self._item = {"type": "function_call", "id": _id("function_call"), **named, "arguments": ""}
            self._item["status"] = "in_progress"
            events.append(self._of_item("response.output_item.added", item=dict(self._item)))
        assert self._item is not None
        self._item["arguments"] += part.arguments
        delta = {"item_id": self._item["id"], "delta": part.arguments}
        return [*events, self._of_item("response.function_call_arguments.delta", **delta)]

    def _ended_call(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events that end a call; a call that was cut short is marked incomplete."""
        is_whole = whole_arguments(item["arguments"]) is not None
        item["status"] = "completed" if is_whole else "incomplete"
        done = {"item_id": item["id"], "name": item["name"], "arguments": item["arguments"]}
        return [self._of_item("response.function_call_arguments.done", **done)] if is_whole else []

    def _of_item(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._event(kind, output_index=len(self._response["output"]), **more)

    def _of_part(self, kind: str, **more: Any) -> dict[str, Any]:
        assert self._item is not None
        return self._of_item(kind, item_id=self._item["id"], content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **more}


def _id(kind: str) -> str:
    return f"{ {'message': 'msg', 'reasoning': 'rs', 'function_call': 'fc'}[kind] }_{secrets.token_hex(16)}"


def _usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
