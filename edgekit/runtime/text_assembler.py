"""Turn the chosen tokens of one answer into pieces of text."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgekit.runtime.generation.stopping import FinishReason, StopStrings
from edgekit.runtime.metrics import Timings

if TYPE_CHECKING:
    from edgekit.runtime.generation.sampling import Logprob
    from edgekit.runtime.generation.tokenizer import Detokeniser
    from edgekit.runtime.generation.tool_call_deltas import ToolCallDelta
    from edgekit.runtime.generation.tool_call_formats import ToolCall


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer: text, and the tokens that it came from."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()
    finish_reason: FinishReason | None = None  # of the last piece only
    timings: Timings | None = None  # of the last piece only
    tool_calls: tuple[ToolCall, ...] = ()  # calls that this piece completes
    content: str = ""  # the part of the text that is neither reasoning nor a tool call
    reasoning: str = ""  # the part of the text that the model wrote between its marks of thinking
    stop: str | int | None = None  # of the last piece only: the stop string or stop token that ended the answer
    tool_call_deltas: tuple[ToolCallDelta, ...] = ()  # the arguments that this piece adds to calls


_PIECE_BYTES, _LOGPROB_BYTES = 288, 100  # of a queued piece of one token, and of each log probability with it


class TextAssembler:
    """Detokenise one answer, watch for stop strings, and group text with its tokens into pieces.

    Text that may still become another character or a stop string is held back, together with its tokens.
    """

    def __init__(self, detokeniser: Detokeniser, stop: tuple[str, ...]) -> None:
        self.pieces: deque[Piece] = deque()
        self._detokeniser, self._stop_strings = detokeniser, StopStrings(stop)
        self.stop: str | int | None = None  # the stop string, or the stop token, that ended the answer
        self._text = ""
        self._tokens: list[int] = []
        self._logprobs: list[Logprob] = []

    @property
    def unread_bytes(self) -> int:
        """Return about how many bytes the queued pieces take, most of which have one token."""
        try:
            logprobs = self.pieces[0].logprobs[:1]
        except IndexError:  # another thread may have just read the last one
            return 0
        return len(self.pieces) * (_PIECE_BYTES + sum(1 + len(each.top) for each in logprobs) * _LOGPROB_BYTES)

    def append(self, token: int, logprob: Logprob | None = None) -> bool:
        """Add a token; return True if its text completes a stop string."""
        self._tokens.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        passed = self._stop_strings.push(self._detokeniser.push(token))
        self._text += passed.text
        self.stop = passed.stop
        return passed.stop is not None

    def flush(self) -> bool:
        """Release the held-back text; return True if it contains a stop string."""
        passed = self._stop_strings.push(self._detokeniser.flush())
        self._text += passed.text if passed.stop else passed.text + self._stop_strings.flush()
        self.stop = self.stop if passed.stop is None else passed.stop
        return passed.stop is not None

    def emit(self) -> None:
        """Queue the released text, if there is any, as a piece."""
        if self._text:
            self.pieces.append(Piece(self._text, tuple(self._tokens), tuple(self._logprobs)))
            self._text, self._tokens, self._logprobs = "", [], []

    def emit_last(self, reason: FinishReason, timings: Timings) -> None:
        """Queue the last piece, which may have no text."""
        tokens, logprobs = tuple(self._tokens), tuple(self._logprobs)
        self.pieces.append(Piece(self._text, tokens, logprobs, reason, timings, stop=self.stop))
