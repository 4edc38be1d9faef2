"""`/tokenize`, `/detokenize` and `/tokenizer_info`: the tokenizer of a model, for evaluators that run elsewhere."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import ConfigDict, Field, JsonValue, model_validator

from edgekit.apps.serve.call import Call, json_response
from edgekit.apps.serve.chat import ChatMessage
from edgekit.apps.serve.fields import ApiFields, Name, TokenNumber, joined_system
from edgekit.apps.serve.problems import invalid

if TYPE_CHECKING:
    from starlette.responses import Response


_ONE: list[JsonValue] = [
    {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
    {"required": ["messages"], "properties": {"messages": {"type": "array"}}},
]


class TokenizeBody(ApiFields):
    """A text, or messages for the chat template."""

    model: Name | None = None
    model_config = ConfigDict(json_schema_extra={"oneOf": _ONE})

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _one_is_given(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt: give either prompt or messages", "prompt")
        return self


class DetokenizeBody(ApiFields):
    """Tokens."""

    model: Name | None = None
    tokens: Annotated[list[TokenNumber], Field(max_length=1 << 20)]


async def tokenize(call: Call) -> Response:
    """Return the tokens of a text, or of a conversation."""
    body = await call.body(TokenizeBody)
    model = await call.model(body.model)
    runtime, adds = model.runtime.runtime, body.add_special_tokens is not False
    messages = [message.plain(index) for index, message in enumerate(body.messages or ())]

    call.stack.enter_context(call.service.admission.slots(model, call.key, 1))

    def encode() -> list[int]:
        if body.prompt is not None:
            runtime.check_size(body.prompt)
            return runtime.encode(body.prompt, add_special_tokens=adds)
        return runtime.encode(runtime.render(joined_system(messages)), add_special_tokens=False)

    tokens = await asyncio.to_thread(encode)
    return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": model.context})


async def detokenize(call: Call) -> Response:
    """Return the text of tokens."""
    body = await call.body(DetokenizeBody)
    runtime = (await call.model(body.model)).runtime.runtime
    if outside := [each for each in body.tokens if each >= runtime.codec.vocabulary]:
        raise invalid(f"tokens: {outside[0]} is outside the vocabulary of {runtime.codec.vocabulary}", "tokens")
    decode = runtime.codec.decode
    return json_response({"prompt": await asyncio.to_thread(decode, body.tokens, skip_special=False)})


async def tokenizer_info(call: Call) -> Response:
    """Return the special tokens and the chat template of the default model, or of `?model=`."""
    name = call.request.query_params.get("model") or call.service.models.names()[0]
    runtime = (await call.model(name)).runtime.runtime
    special = runtime.template.special_tokens
    return json_response(
        {
            **{name: special.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")},
            "vocab_size": runtime.codec.vocabulary,
            "chat_template": runtime.template.source,
        }
    )
