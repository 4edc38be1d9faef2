"""Checks and encodes the prompt of a request: a text, tokens or messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from edgekit.errors import ContextExceeded, InvalidOption, InvalidPrompt
from edgekit.runtime.generation.chat_template import ChatTemplate, Message
from edgekit.runtime.generation.tokenizer import SHORTEN, Codec, text_bytes

if TYPE_CHECKING:
    from edgekit.runtime.request import RequestLimits

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]


def check_text(prompt: object) -> None:
    """Refuse a prompt of `generate` that is no text."""
    if not isinstance(prompt, str):
        is_chat = isinstance(prompt, Sequence) and any(isinstance(each, Mapping) for each in prompt)
        fix = "use chat(messages) for messages" if is_chat else "use complete(tokens) for tokens"
        raise InvalidPrompt(f"generate takes a text; {fix}, or stream, which takes either")


def check_messages(messages: object) -> None:
    """Refuse messages of `chat` that are a text or tokens."""
    if isinstance(messages, str | bytes) or (
        isinstance(messages, Sequence) and any(not isinstance(message, Mapping) for message in messages)
    ):
        raise InvalidPrompt(
            'chat takes a list of messages, as [{"role": "user", "content": "..."}]; use generate(text) for plain text'
        )


def encode_prompt(
    prompt: Prompt,
    codec: Codec,
    template: ChatTemplate,
    limits: RequestLimits,
    tools: Sequence[Mapping[str, Any]] | None,
    template_options: Mapping[str, Any] | None,
) -> tuple[list[int], list[int]]:
    """Return the prompt's tokens, and the tokens whose text the answer continues (none for messages)."""
    if isinstance(prompt, str):
        _refuse_chat_options(tools, template_options)
        tokens = codec.encode(prompt, add_special_tokens=True, most=limits.prompt_tokens)
        return tokens, tokens
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise InvalidPrompt("a prompt is a text, a list of tokens or a list of messages")
    if prompt and type(prompt[0]) is int and limits.max_length is not None and len(prompt) >= limits.max_length:
        raise ContextExceeded(len(prompt), limits.prompt_tokens, SHORTEN)
    if all(type(token) is int for token in prompt):
        _refuse_chat_options(tools, template_options)
        given = [token for token in prompt if isinstance(token, int)]
        are_known = all(0 <= token < limits.capabilities.vocabulary for token in given)
        return given, given if are_known else []  # `Request` refuses unknown tokens
    if any(not isinstance(message, Mapping) for message in prompt):
        raise InvalidPrompt("a prompt is a text, a list of whole numbers (tokens) or a list of messages")
    messages = template.readable([message for message in prompt if isinstance(message, Mapping)])
    text = template.render(
        messages, tools=tools, template_options=template_options, most_bytes=chat_bytes(limits.prompt_tokens)
    )
    return codec.encode(text, add_special_tokens=False, most=limits.prompt_tokens), []


def chat_bytes(most: int) -> int:
    """Return the most bytes of a chat whose prompt may have `most` tokens. Templates may leave out much of it."""
    return 4 * text_bytes(most)


def _refuse_chat_options(tools: object, template_options: object) -> None:
    """Refuse options of a chat unless the prompt is a list of messages."""
    for name, value in (("tools", tools), ("template_options", template_options)):
        if value is not None:
            raise InvalidOption(f"{name}: belongs to a chat; give a list of messages as the prompt")


def text_of(prompt: Prompt, template: ChatTemplate, limits: RequestLimits) -> tuple[str, bool] | None:
    """Return the prompt's text, and whether special tokens are added to it; None for a prompt of tokens."""
    if isinstance(prompt, str):
        return prompt, True
    messages = [each for each in prompt if isinstance(each, Mapping)]
    most = chat_bytes(limits.prompt_tokens)
    return (template.render(messages, most_bytes=most), False) if messages else None
