"""Answers: `Stream` while they are generated, `Answer` when they are whole."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import TYPE_CHECKING, Any

from edgekit.errors import InvalidAnswer, InvalidInput, quote_short
from edgekit.runtime.driver import Driver
from edgekit.runtime.generation.reasoning import ReasoningReader
from edgekit.runtime.generation.sampling import Logprob
from edgekit.runtime.generation.stopping import FinishReason
from edgekit.runtime.generation.tool_call_formats import ToolCall
from edgekit.runtime.generation.tool_calls import ToolCallReader
from edgekit.runtime.lifetimes import OwnedByProcess
from edgekit.runtime.metrics import Timings
from edgekit.runtime.request import Request
from edgekit.runtime.text_assembler import Piece

if TYPE_CHECKING:
    from pydantic import BaseModel


@dataclass(frozen=True)
class Answer:
    """A whole answer. It prints as its text."""

    text: str
    """The whole text of the model."""
    tokens: tuple[int, ...] = field(repr=False)
    finish_reason: FinishReason
    """`stop`, `length`, `tool_calls` or `cancelled`."""
    timings: Timings = field(repr=False)
    seed: int = field(repr=False)
    """The seed that reproduces this answer."""
    logprobs: tuple[Logprob, ...] = field(default=(), repr=False)
    content: str = field(default="", repr=False)
    """The text without tool calls and reasoning."""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = field(default="", repr=False)
    """The text between the model's thinking marks; only in answers to messages."""
    stop: str | int | None = None
    """The stop string or stop token that ended the answer."""
    schema: type[BaseModel] | bool = field(default=False, repr=False)
    """The pydantic class of the answer; True: a JSON schema; False: neither."""

    def __str__(self) -> str:
        return self.text

    @property
    def parsed(self) -> Any:
        """The answer as an instance of the `schema` class, or as a JSON value if `schema` was a JSON schema.

        None if no schema was given. Raises `InvalidAnswer` if the text was cut short, or if a validator of the class
        refuses it.
        """
        if self.schema is False:
            return None
        # A text with tool calls or thinking marks alone has no content.
        text = self.text if self.tool_calls or not self.content else self.content
        try:
            return json.loads(text) if self.schema is True else self.schema.model_validate_json(text)
        except ValueError as error:  # includes pydantic's ValidationError
            first = ": ".join(map(str.strip, str(error).splitlines()[1:3])) or str(
                error
            )  # pydantic's first line counts its errors
            cut = " (cut short; raise max_tokens)" if self.finish_reason == "length" else ""
            raise InvalidAnswer(f"the answer does not follow its schema{cut}: {quote_short(first, 200)}") from error

    def message(self) -> dict[str, Any]:
        """Return the answer as an assistant message of JSON values, to append to the messages of a chat."""
        calls = [call.as_json() for call in self.tool_calls]
        return {"role": "assistant", "content": self.content, **({"tool_calls": calls} if calls else {})}


class _ReadParts:
    """What was read of an answer, in some 12 bytes a token, because an answer may be endless."""

    def __init__(self) -> None:
        self.text, self.content, self.reasoning = StringIO(), StringIO(), StringIO()
        self.tokens = array("i")
        self.logprobs: list[Logprob] = []
        self.tool_calls: list[ToolCall] = []
        self.last: Piece | None = None  # of the whole answer

    def add(self, piece: Piece) -> None:
        self.text.write(piece.text)
        self.content.write(piece.content)
        self.reasoning.write(piece.reasoning)
        self.tokens.extend(piece.tokens)
        self.logprobs += piece.logprobs
        self.tool_calls += piece.tool_calls
        if piece.finish_reason is not None:
            self.last = piece


class Stream(OwnedByProcess):
    """An answer that is being generated. Iterate over its pieces.

    Closing the stream, or dropping the last reference to it, cancels the request and releases its memory.
    """

    def __init__(
        self,
        driver: Driver,
        request: Request,
        tools: frozenset[str] = frozenset(),
        schema: type[BaseModel] | bool = False,
        reasoning: ReasoningReader | None = None,
    ) -> None:
        """`tools`: the names of callable tools; `reasoning`: reads the thinking in answers to messages."""
        self._driver, self._request = driver, request  # first: `__del__` reads them
        super().__init__()
        self._reasoning = reasoning
        self._read = _ReadParts()
        self._schema, self._is_closed = schema, False
        self._tool_calls = ToolCallReader(tools, f"{request.decoding.sampler.seed} {request.prompt_tokens}")

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        piece = None if self._is_closed else self._driver.next_piece(self._request)
        if piece is None:
            raise StopIteration
        return self._with_parts(piece)

    def answer(self) -> Answer:
        """Read the rest of the stream and return the whole answer, including the pieces that were read before."""
        for _ in self:
            pass
        read, last = self._read, self._read.last
        if last is None or last.finish_reason is None or last.timings is None:
            raise InvalidInput("this stream was closed before its end; ask again")
        return Answer(
            text=read.text.getvalue(),
            tokens=tuple(read.tokens),
            finish_reason=last.finish_reason,
            timings=last.timings,
            seed=self.seed,
            logprobs=tuple(read.logprobs),
            content=self._tool_calls.content if read.tool_calls else read.content.getvalue(),
            tool_calls=tuple(read.tool_calls),
            reasoning=read.reasoning.getvalue(),
            stop=last.stop,
            schema=self._schema,
        )

    @property
    def seed(self) -> int:
        """The seed that reproduces this answer."""
        return self._request.decoding.sampler.seed

    @property
    def prompt_tokens(self) -> int:
        return self._request.prompt_tokens

    @property
    def processed_tokens(self) -> int:
        """The number of tokens that the engine has processed; 0 before the request runs and after its end."""
        state = self._request.state
        return 0 if state is None else state.position

    @property
    def generated_tokens(self) -> int:
        """The number of tokens chosen so far, including those whose text is still held back."""
        return self._request.num_generated

    def cancel(self) -> None:
        """End the answer, from any thread; the reader gets the text so far and the finish reason `cancelled`."""
        self._driver.cancel(self._request)

    def cancel_soon(self) -> None:
        """Like `cancel`, without waiting for any lock: for signal handlers."""
        self._driver.cancel_soon(self._request)

    @property
    def is_done(self) -> bool:
        """Whether the answer has ended; the last pieces may be unread."""
        return self._request.is_done

    @property
    def has_pieces(self) -> bool:
        """Whether pieces are ready to be read."""
        return bool(self._request.text.pieces)

    def poll(self, most: int | None = None) -> list[Piece]:
        """Return the pieces that are ready, or the first `most` of them, without driving the engine."""
        if self._is_closed:
            return []
        return [self._with_parts(piece) for piece in self._driver.poll(self._request, most)]

    def close(self) -> None:
        """Cancel the request; no further piece comes."""
        self._is_closed = True
        if not self._request.is_done:
            self._driver.cancel(self._request)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The garbage collector may run while this thread holds the driver's lock.
        self._driver.cancel_soon(self._request)

    def _with_parts(self, piece: Piece) -> Piece:
        """Set the reasoning, content and completed tool calls of a piece, and remember them."""
        piece = self._parsed(piece)
        self._read.add(piece)
        return piece

    def _parsed(self, piece: Piece) -> Piece:
        is_last, reasoning, content = piece.finish_reason is not None, "", piece.text
        if self._reasoning is not None:
            reasoning, content = self._reasoning.push(piece.text)
            if is_last:
                held = self._reasoning.finish()
                reasoning, content = reasoning + held.reasoning, content + held.content
        reader = self._tool_calls
        if not reader.names:
            return replace(piece, content=content, reasoning=reasoning)
        calls, content = reader.push(content), reader.take_content()
        if not is_last:
            return replace(
                piece, content=content, reasoning=reasoning, tool_calls=calls, tool_call_deltas=reader.deltas()
            )
        calls += reader.finish()
        return replace(
            piece,
            content=content + reader.rest,
            reasoning=reasoning,
            tool_calls=calls,
            tool_call_deltas=reader.deltas(),
            finish_reason="tool_calls" if reader.count else piece.finish_reason,
        )
