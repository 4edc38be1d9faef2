"""`POST /v1/completions`: plain continuation of texts and tokens, and the log-probabilities of prompts (`echo`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from edgekit import Logprob, Score
from edgekit.apps.serve.answering import Answers, PromptJob, TokenUsage, ask
from edgekit.apps.serve.call import Call, EventStream, event, json_response
from edgekit.apps.serve.chat import chunks, frame_of, usage_content
from edgekit.apps.serve.fields import WHOLE, SamplingFields, TokenNumber, listed, refuse
from edgekit.apps.serve.models import ServedModel
from edgekit.apps.serve.problems import error_content, invalid

if TYPE_CHECKING:
    from starlette.responses import Response

MOST_PROMPTS, MOST_ANSWERS = 256, 256
_DEFAULT_TOKENS = 16  # OpenAI's default
REFUSED = {
    "suffix": "filling in the middle is not offered",
    "messages": "use /v1/chat/completions",
    "tools": "use /v1/chat/completions",
    "response_format": "use /v1/chat/completions, or edgekit.regex or edgekit.grammar",
    "prompt_logprobs": "use echo with logprobs",
}
TokenList = Annotated[list[TokenNumber], Field(min_length=1, max_length=1 << 20)]


class CompletionBody(SamplingFields):
    """The body of a completion."""

    prompt: str | TokenList | Annotated[list[str | TokenList], Field(min_length=1, max_length=MOST_PROMPTS)]
    max_tokens: Annotated[int, Field(ge=0, le=1 << 31), WHOLE] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=0, le=128), WHOLE] | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None


async def completions(call: Call) -> Response | EventStream:
    """Continue each prompt `n` times; choice `i * n + j` is answer `j` to prompt `i`."""
    body = await call.body(CompletionBody)
    refuse(body, REFUSED)
    if body.best_of is not None and body.best_of != body.choices:
        raise invalid("best_of: only as many as n are made; leave it out", "best_of", "unsupported_parameter")
    model = await call.model(body.model)
    codec, writer = model.runtime.runtime.codec, CompletionWriter(model, body)
    prompts = listed(body.prompt)
    if len(prompts) * body.choices > MOST_ANSWERS:
        raise invalid(f"n: {MOST_ANSWERS} answers at most, over all prompts", "n")
    adds, most = body.add_special_tokens is not False, model.runtime.runtime.most_prompt_tokens
    call.stack.enter_context(call.service.admission.slots(model, call.key, len(prompts) * body.choices))

    def encode(prompt: str | list[int]) -> list[int]:
        return codec.encode(prompt, add_special_tokens=adds, most=most) if isinstance(prompt, str) else prompt

    tokens = await asyncio.to_thread(lambda: [encode(prompt) for prompt in prompts])
    if outside := [each for prompt in tokens for each in prompt if each >= codec.vocabulary]:
        raise invalid(f"prompt: token {outside[0]} is outside the vocabulary of {codec.vocabulary}", "prompt")
    options = body.sampling(call.service.models.default_sampling(model))
    options["max_tokens"] = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if body.logprobs is not None:
        options["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None and options["max_tokens"] == 1:
        options["ignore_eos"] = True  # evaluators expect exactly one entry after the prompt's entries
    continued = [await _continued(call, model, body, each, options) for each in tokens]
    if body.stream:
        return EventStream(call, writer.events(continued), lambda error: event(error_content(error, "openai", call.id)))
    return json_response(await writer.whole(continued))


class Continuation(NamedTuple):
    """One submitted prompt: its scores if requested, and its answers unless no token is requested."""

    tokens: list[int]
    score: asyncio.Task[Score] | None
    answers: Answers | None

    @property
    def usage(self) -> TokenUsage:
        return self.answers.usage if self.answers is not None else TokenUsage(len(self.tokens))


async def _continued(
    call: Call, model: ServedModel, body: CompletionBody, tokens: list[int], options: dict[str, Any]
) -> Continuation:
    score = None
    if body.echo and body.logprobs is not None and len(tokens) > 1:
        # No cached prefix is used, so equal prompts give equal numbers.
        runtime = model.runtime
        score = asyncio.create_task(runtime.prompt_logprobs(tokens, top=body.logprobs, adapter=model.adapter))
        call.stack.callback(score.cancel)
    if body.echo and options["max_tokens"] == 0:
        return Continuation(tokens, score, None)
    answers = await ask(call, model, PromptJob(tokens, options, body.choices), is_admitted=True)
    return Continuation(tokens, score, answers)


class CompletionWriter:
    """Writes the choices of completions, as chunks or whole."""

    def __init__(self, model: ServedModel, body: CompletionBody) -> None:
        self._body, self._codec = body, model.runtime.runtime.codec
        self._frame = frame_of(model, "cmpl", "text_completion")

    async def choices(self, place: int, one: Continuation) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of the answers to one prompt."""
        first, offset = place * self._body.choices, 0
        if self._body.echo:
            echoed = await self._echo(one)
            offset = len(echoed["text"])
            reason = "length" if one.answers is None else None
            for index in range(first, first + self._body.choices):
                yield {"index": index, **echoed, "finish_reason": reason}
        if one.answers is None:
            return
        offsets = [offset] * self._body.choices
        async for answer, piece in one.answers.pieces():
            logprobs = None if self._body.logprobs is None else self._logprobs(piece.logprobs, offsets[answer])
            offsets[answer] += len(piece.text)
            reason = piece.finish_reason
            yield {"index": first + answer, "text": piece.text, "logprobs": logprobs, "finish_reason": reason}

    async def _echo(self, one: Continuation) -> dict[str, Any]:
        """Return the prompt as a chunk."""
        text = await asyncio.to_thread(self._codec.decode, one.tokens, skip_special=True)
        if self._body.logprobs is None:
            return {"text": text, "logprobs": None}
        found = [Logprob(one.tokens[0], 0.0, ())]
        if one.score is not None:
            score = await one.score
            tops = score.top or ((),) * len(score.logprobs)
            found += [Logprob(*each) for each in zip(score.tokens, score.logprobs, tops, strict=True)]
        logprobs = self._logprobs(found, 0)
        logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None  # the first token has no probability
        return {"text": text, "logprobs": logprobs}

    def _logprobs(self, found: Sequence[Logprob], offset: int) -> dict[str, Any]:
        texts, offsets = [self._token_text(each.token) for each in found], []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(each.logprob) for each in found],
            "top_logprobs": [
                # Tokens with equal text share a key: the likelier one wins, and the chosen token over all.
                {self._token_text(token): _finite(value) for token, value in reversed(each.top)}
                | {self._token_text(each.token): _finite(each.logprob)}
                for each in found
            ],
            "text_offset": offsets,
        }

    def _token_text(self, token: int) -> str:
        if self._body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._codec.token_bytes(token).decode("utf-8", "replace")

    async def events(self, continued: Sequence[Continuation]) -> AsyncIterator[bytes]:
        """Yield the stream, one prompt after the other."""
        choices = (choice for index, one in enumerate(continued) async for choice in self.choices(index, one))
        usage = (lambda: _sum(continued)) if self._body.reports_usage else None
        async for chunk in chunks(self._frame, choices, usage):
            yield chunk

    async def whole(self, continued: Sequence[Continuation]) -> dict[str, Any]:
        """Return all choices, in the order of their prompts."""
        joined: dict[int, dict[str, Any]] = {}
        for position, one in enumerate(continued):
            async for choice in self.choices(position, one):
                index = choice["index"]
                joined[index] = _added(joined[index], choice) if index in joined else choice
        choices = [joined[index] for index in sorted(joined)]
        return {**self._frame, "choices": choices, "usage": _sum(continued)}


def _added(first: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    logprobs = first["logprobs"] or more["logprobs"]
    if first["logprobs"] and more["logprobs"]:
        logprobs = {key: [*first["logprobs"][key], *more["logprobs"][key]] for key in first["logprobs"]}
    return {**more, "text": first["text"] + more["text"], "logprobs": logprobs}


def _sum(continued: Sequence[Continuation]) -> dict[str, Any]:
    return usage_content(sum((one.usage for one in continued), TokenUsage()))


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)
