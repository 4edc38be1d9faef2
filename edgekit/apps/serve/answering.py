"""Turns a checked request into pieces of its answers, with admission and counters. Used by every API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from edgekit import AsyncStream, Logprob, Piece
from edgekit.apps.serve.call import Call
from edgekit.apps.serve.models import ServedModel
from edgekit.apps.serve.problems import ApiError

_UNREAD_PIECES = 64


class PromptJob(NamedTuple):
    """One prompt, with the options of its answers."""

    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    answers: int = 1
    tools: Sequence[Mapping[str, Any]] | None = None
    template_options: Mapping[str, Any] | None = None


class TokenUsage(NamedTuple):
    """Token counts of a prompt and all answers to it."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: object) -> TokenUsage:
        """Return the sum of two usages."""
        assert isinstance(other, TokenUsage)
        return TokenUsage(*(a + b for a, b in zip(self, other, strict=True)))


class Answers:
    """The answers to one prompt while they are generated."""

    def __init__(self, call: Call, streams: Sequence[AsyncStream], waiting: ExitStack) -> None:
        self._call, self._streams, self._waiting = call, streams, waiting
        self._written = self._reasoned = self._cached = 0
        self.prompt_tokens = streams[0].prompt_tokens

    @property
    def usage(self) -> TokenUsage:
        """The token counts so far."""
        return TokenUsage(self.prompt_tokens, self._cached, self._written, self._reasoned)

    def cancel(self, place: int) -> None:
        """End an answer early, because it is complete."""
        self._streams[place].cancel()

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield every piece with the index of its answer."""
        async for place, piece in self._merged():
            self._waiting.close()
            self._reasoned += len(piece.tokens) if piece.reasoning and not piece.content else 0
            if piece.timings is not None:
                self._written += piece.timings.tokens
                self._cached = max(self._cached, piece.timings.cached_tokens)
                self._call.service.admission.observe(piece.timings.total_s)
                if piece.finish_reason == "cancelled":
                    raise ApiError(503, "the server ended this answer", code="server_shutdown", retry_after_s=1)
            yield place, piece

    async def _merged(self) -> AsyncIterator[tuple[int, Piece]]:
        if len(self._streams) == 1:
            async for piece in self._streams[0]:
                yield 0, piece
            return
        queue: asyncio.Queue[tuple[int, Piece | BaseException]] = asyncio.Queue(_UNREAD_PIECES)

        async def read(place: int, stream: AsyncStream) -> None:
            try:
                async for piece in stream:
                    await queue.put((place, piece))
            except Exception as error:
                await queue.put((place, error))

        readers = [asyncio.create_task(read(place, stream)) for place, stream in enumerate(self._streams)]
        try:
            remaining = len(readers)
            while remaining:
                place, item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                remaining -= item.finish_reason is not None
                yield place, item
        finally:
            for reader in readers:
                reader.cancel()


async def ask(call: Call, model: ServedModel, asked: PromptJob, *, is_admitted: bool = False) -> Answers:
    """Submit a request, or raise `ApiError`. The end of the call cancels it in any case.

    `is_admitted`: the call has counted its answers with `Admission.slots` already.
    """
    admission = call.service.admission
    if not is_admitted:
        call.stack.enter_context(admission.slots(model, call.key, asked.answers))
    streams = await model.runtime.submit_several(
        asked.prompt,
        asked.answers,
        tools=asked.tools,
        template_options=asked.template_options,
        **{**asked.options, "tenant": call.key.name, "adapter": model.adapter},
    )
    for stream in streams:
        call.stack.push_async_callback(stream.close)
    waiting = call.stack.enter_context(ExitStack())
    waiting.enter_context(admission.prompt_tokens(model, streams[0].prompt_tokens))
    call.ignore("x-edgekit-model", [model.name])
    return Answers(call, streams, waiting)


def chat_logprobs(model: ServedModel, logprobs: Sequence[Logprob]) -> list[dict[str, Any]]:
    """Return log-probabilities in the form of chat completions."""
    return [
        _token(model, each.token, each.logprob)
        | {"top_logprobs": [_token(model, token, logprob) for token, logprob in each.top]}
        for each in logprobs
    ]


def _token(model: ServedModel, token: int, logprob: float) -> dict[str, Any]:
    data = model.runtime.runtime.codec.token_bytes(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}
