"""`POST /v1/messages` and `count_tokens`: Anthropic's API."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, JsonValue

from edgekit import Piece
from edgekit.apps.serve.answering import Answers, PromptJob, TokenUsage, ask
from edgekit.apps.serve.call import Call, EventStream, event, json_response
from edgekit.apps.serve.chat import NamedForm, form_option
from edgekit.apps.serve.fields import (
    WHOLE,
    ApiFields,
    Name,
    OwnFields,
    OwnOptions,
    Real,
    StopText,
    TokenLimit,
    WithoutEffect,
    refuse,
)
from edgekit.apps.serve.models import ServedModel
from edgekit.apps.serve.problems import ApiError, error_content, not_offered
from edgekit.apps.serve.tools import CallParts, FunctionTool, ToolName, ToolPlan, plan_tools, whole_arguments

if TYPE_CHECKING:
    from starlette.responses import Response

REFUSED = {"mcp_servers": "this server opens no connections", "container": "nothing is run here"}
# Claude Code begins its system prompt with a line that differs in every request, so no prefix would ever be found.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}


class ContentBlock(ApiFields):
    """A block of a message."""

    type: Name
    text: str | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, JsonValue] | None = None
    tool_use_id: Name | None = None
    content: str | Annotated[list[dict[str, JsonValue]], Field(max_length=1024)] | None = None
    is_error: bool | None = None
    thinking: str | None = None


class AnthropicMessage(ApiFields):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Field(max_length=1024)]

    def plain(self, param: str) -> list[dict[str, Any]]:
        """Return it as messages for chat templates, in which each tool result is a separate message."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results, texts, calls, thoughts = list[dict[str, Any]](), list[str](), list[dict[str, Any]](), list[str]()
        for index, block in enumerate(self.content):
            if block.type == "text":
                texts.append(block.text or "")
            elif block.type == "tool_use" and block.name is not None:
                function = {"name": block.name, "arguments": block.input or {}}
                calls.append({"id": block.id, "type": "function", "function": function})
            elif block.type == "tool_result":
                content = _result_text(block, f"{param}.content.{index}")
                results.append({"role": "tool", "tool_call_id": block.tool_use_id or "", "content": content})
            elif block.type == "thinking":
                thoughts.append(block.thinking or "")
            elif block.type != "redacted_thinking":
                raise not_offered(f"blocks of type {block.type[:40]!r} cannot be read", f"{param}.content.{index}.type")
        message: dict[str, Any] = {"role": self.role, "content": "".join(texts)}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning": "".join(thoughts)} if thoughts else {}
        return results if results and not texts else [*results, message]


def _result_text(block: ContentBlock, param: str) -> str:
    """Return the text of a tool's result. Templates have no mark for a failure, so the text says it."""
    if block.content is None or isinstance(block.content, str):
        text = block.content or ""
    elif any(part.get("type") != "text" for part in block.content):
        raise not_offered("results of tools must be text", param)
    else:
        text = "".join(str(part.get("text", "")) for part in block.content)
    return f"Error: {text}" if block.is_error and not text.lower().startswith("error") else text


class Thinking(ApiFields):
    """The switch for thinking, and its budget of tokens."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, le=1 << 31), WHOLE] | None = None


class AnthropicTool(ApiFields):
    """A tool. Anthropic runs every tool whose type is not `custom` itself."""

    type: Name | None = None
    name: ToolName | None = None
    description: str | None = None
    input_schema: dict[str, JsonValue] | None = None


class OutputConfig(ApiFields):
    """The form of an answer."""

    format: NamedForm | None = None


class AnthropicChoice(ApiFields):
    """The tools that may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class PromptBody(ApiFields):
    """The part of a request whose tokens are counted: the conversation and its tools."""

    model: Name | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=4096)]
    system: str | Annotated[list[ContentBlock], Field(max_length=64)] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=256)] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: WithoutEffect = None
    cache_control: WithoutEffect = None
    service_tier: WithoutEffect = None

    def plain(self) -> list[dict[str, Any]]:
        """Return the conversation as chat templates expect it."""
        messages = [each for index, message in enumerate(self.messages) for each in message.plain(f"messages.{index}")]
        if messages[-1]["role"] == "assistant":
            raise not_offered("a client cannot begin the answer; end with a user's message", "messages")
        blocks = [self.system] if isinstance(self.system, str) else [block.text or "" for block in self.system or ()]
        system = "\n".join(text for each in blocks if (text := _BILLING.sub("", each)))
        return [{"role": "system", "content": system}, *messages] if system else messages

    def planned_tools(self) -> ToolPlan:
        """Return the plan for the tools. Anthropic's own need its servers, or a model that was trained for them."""
        functions = list[FunctionTool]()
        for index, tool in enumerate(self.tools or ()):
            if tool.type not in (None, "custom"):
                reason = f"tools of type {tool.type[:40]!r} are Anthropic's own, and this server has none of them"
                raise not_offered(reason, f"tools.{index}.type")
            given = FunctionTool(name=tool.name or "", description=tool.description, parameters=tool.input_schema)
            functions.append(given)
        choice = self.tool_choice or AnthropicChoice(type="auto")
        kind = {"any": "required", "tool": f"function:{choice.name}"}.get(choice.type, choice.type)
        return plan_tools(functions, kind, parallel=choice.disable_parallel_tool_use is not True)

    def template_options(self) -> dict[str, Any] | None:
        """Variables of the template that turn thinking on or off."""
        if self.thinking is None or self.thinking.type == "adaptive":
            return None
        return {"enable_thinking": self.thinking.type == "enabled"}


class MessagesBody(PromptBody):
    """The body of a message."""

    max_tokens: TokenLimit
    temperature: Annotated[Real, Field(ge=0, le=1)] | None = None
    top_p: Annotated[Real, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 20), WHOLE] | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = None
    stream: bool | None = None
    edgekit: OwnOptions | None = None

    def sampling(self, defaults: dict[str, Any]) -> dict[str, Any]:
        """Return the runtime options of the request."""
        given = dict(defaults) if self.temperature is None and self.top_p is None and self.top_k is None else {}
        given = given or {"temperature": 1.0}
        given |= self.model_dump(include={"temperature", "top_p"}, exclude_none=True)
        given |= {"top_k": self.top_k} if self.top_k else {}
        if stops := [each for each in self.stop_sequences or () if each]:
            given["stop"] = stops
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            given["thinking_tokens"] = self.thinking.budget_tokens
        return {**given, "max_tokens": self.max_tokens, **OwnFields.of(self.edgekit)}


async def count_tokens(call: Call) -> Response:
    """Count the tokens of a conversation with its tools."""
    body = await call.body(PromptBody)
    model = await call.model(body.model)
    runtime = model.runtime.runtime
    call.stack.enter_context(call.service.admission.slots(model, call.key, 1))
    described, messages = body.planned_tools().described, body.plain()

    def count() -> int:
        text = runtime.render(messages, tools=described, template_options=body.template_options())
        return len(runtime.encode(text, add_special_tokens=False))

    return json_response({"input_tokens": await asyncio.to_thread(count)})


async def messages(call: Call) -> Response | EventStream:
    """Answer a conversation."""
    body = await call.body(MessagesBody)
    refuse(body, REFUSED)
    model = await call.model(body.model)
    plan = body.planned_tools()
    options = body.sampling(call.service.models.default_sampling(model))
    form = body.output_config.format if body.output_config else None
    options |= {"schema": plan.schema} if plan.is_forced else form_option(form)
    answers = await ask(call, model, PromptJob(body.plain(), options, 1, plan.described, body.template_options()))
    writer = MessageWriter(model, answers, plan)
    if body.stream:
        ping = event({"type": "ping"}, "ping")
        return EventStream(call, writer.stream(), lambda error: _failed(error, call.id), ping=ping)
    return json_response(await writer.whole())


def _failed(error: ApiError, request_id: str) -> bytes:
    return event(error_content(error, "anthropic", request_id), "error")


class MessageWriter:
    """Writes pieces as blocks, one open at a time."""

    def __init__(self, model: ServedModel, answers: Answers, plan: ToolPlan) -> None:
        self._answers, self._plan = answers, plan
        self._open: str | None = None  # the type of the open block
        self._blocks = 0
        self._message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the events as bytes."""
        async for each in self.events():
            yield event(each, each["type"])

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield every event of the message."""
        is_begun, last, calls = False, None, CallParts(self._plan.most_calls)
        async for _, piece in self._answers.pieces():
            if not is_begun:
                is_begun = True
                first = {**self._message, "usage": _usage(self._answers.usage)}
                yield {"type": "message_start", "message": first}
            for kind, text in (("thinking", piece.reasoning), ("text", "" if self._plan.is_forced else piece.content)):
                if text:
                    for each in self._grown(kind, text):
                        yield each
            for part in calls.of(piece):
                if part.name is not None:
                    block = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": part.name, "input": {}}
                    for each in self._begun("tool_use", block):
                        yield each
                yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})
            if calls.is_enough(piece):
                self._answers.cancel(0)
            last = piece
        for each in self._closed():
            yield each
        yield {"type": "message_delta", "delta": _ending(last), "usage": _usage(self._answers.usage)}
        yield {"type": "message_stop"}

    def _grown(self, kind: str, text: str) -> list[dict[str, Any]]:
        delta = {"type": f"{kind}_delta", kind: text}
        if self._open == kind:
            return [self._delta(delta)]
        empty = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
        return [*self._begun(kind, empty), self._delta(delta)]

    def _begun(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._closed()
        self._open = kind
        return [*events, {"type": "content_block_start", "index": self._blocks, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._blocks, "delta": delta}

    def _closed(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        self._open, index = None, self._blocks
        self._blocks += 1
        return [{"type": "content_block_stop", "index": index}]

    async def whole(self) -> dict[str, Any]:
        """Return the whole message, joined from its events."""
        message = dict(self._message)
        blocks: list[dict[str, Any]] = []
        written: list[str] = []  # the arguments of each block
        async for each in self.events():
            if each["type"] == "content_block_start":
                blocks.append(dict(each["content_block"]))
                written.append("")
            elif each["type"] == "content_block_delta":
                kind, delta = blocks[-1]["type"], each["delta"]
                if kind == "tool_use":
                    written[-1] += delta["partial_json"]
                else:
                    blocks[-1][kind] += delta[kind]
            elif each["type"] == "message_delta":
                message |= {**each["delta"], "usage": each["usage"]}
        for block, text in zip(blocks, written, strict=True):
            if block["type"] == "tool_use":
                block["input"] = whole_arguments(text)
        # An incomplete call is dropped.
        return message | {"content": [block for block in blocks if block.get("input", block) is not None]}


def _ending(last: Piece | None) -> dict[str, Any]:
    assert last is not None
    if isinstance(last.stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop}
    return {"stop_reason": _STOPS.get(str(last.finish_reason), "end_turn"), "stop_sequence": None}


def _usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
