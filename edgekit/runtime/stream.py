"""An answer on its way, and whole. Knows the loop that makes it, and nothing of how it was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from edgekit.errors import InvalidInput
from edgekit.runtime.loop import Loop
from edgekit.runtime.metrics import Timings
from edgekit.runtime.sampling import Logprob
from edgekit.runtime.sequence import Piece
from edgekit.runtime.sequence import Sequence as Living
from edgekit.runtime.stopping import FinishReason
from edgekit.runtime.tools import ToolCall, parse_tool_calls


class Answer(NamedTuple):
    """A whole answer. `text` is all that the model wrote; `content` leaves out tool calls."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    timings: Timings
    seed: int
    logprobs: tuple[Logprob, ...] = ()
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class Stream:
    """An answer on its way: iterate it for pieces. Closing it, or letting go of it, releases all that it holds."""

    def __init__(self, loop: Loop, sequence: Living, tools: frozenset[str]) -> None:
        self._loop, self._sequence, self.tools = loop, sequence, tools
        self._closed = False

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        piece = None if self._closed else self._loop.next_piece(self._sequence)
        if piece is None:
            raise StopIteration
        return piece

    def answer(self) -> Answer:
        """All pieces that were not read yet, joined."""
        return joined(list(self), self)

    @property
    def seed(self) -> int:
        """What reproduces this answer."""
        return self._sequence.seed

    @property
    def prompt_tokens(self) -> int:
        return self._sequence.prompt_tokens

    @property
    def fed_tokens(self) -> int:
        """Tokens that the engine has taken so far; 0 before it began and after the end."""
        state = self._sequence.state
        return 0 if state is None else state.position

    @property
    def generated_tokens(self) -> int:
        """Tokens that were chosen so far, those included whose text is still held back."""
        return self._sequence.generated

    def cancel(self) -> None:
        """End the answer, from any thread; whoever reads it gets what is there and the reason `cancelled`."""
        self._loop.cancel(self._sequence)

    def cancel_soon(self) -> None:
        """As `cancel`, without waiting for any lock: for signal handlers."""
        self._loop.cancel_soon(self._sequence)

    def poll(self) -> list[Piece]:
        """The pieces that are there already; it never drives the engine."""
        return [] if self._closed else self._loop.poll(self._sequence)

    def close(self) -> None:
        """Cancel, and give no further piece."""
        self._closed = True
        if not self._sequence.is_done:
            self._loop.cancel(self._sequence)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Garbage is collected anywhere, also where the loop's lock is held.
        self._loop.cancel_soon(self._sequence)


def joined(pieces: Sequence[Piece], stream: Stream) -> Answer:
    """All pieces of one answer, the last included."""
    if not pieces or pieces[-1].finish_reason is None or pieces[-1].timings is None:
        raise InvalidInput("this stream was read or closed already; ask again")
    text = "".join(piece.text for piece in pieces)
    content, calls = parse_tool_calls(text, stream.tools) if stream.tools else (text, ())
    return Answer(
        text=text,
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        finish_reason="tool_calls" if calls else pieces[-1].finish_reason,
        timings=pieces[-1].timings,
        seed=stream.seed,
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        content=content,
        tool_calls=calls,
    )
