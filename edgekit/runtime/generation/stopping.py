"""The end of an answer: stop strings, stop tokens and the token limit."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from edgekit.common.base import Frozen

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


class Stopping(Frozen):
    """The options that end an answer. A stop string or stop token is never part of it."""

    max_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = Field(
        default=None,
        description="Most tokens of an answer; without it, as many as the context can hold. 0: only read the prompt.",
    )
    stop: tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...] = Field(
        default=(), max_length=16, strict=False, description="End the answer before this text."
    )
    stop_tokens: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=256, strict=False)] = ()
    thinking_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = Field(
        default=None, description="Most tokens of thinking; after them, `</think>` is written."
    )
    ignore_eos: bool = Field(default=False, description="Continue where the model would end.")


class ReleasedText(NamedTuple):
    """Released text, and the stop string that ended it."""

    text: str
    stop: str | None


class StopStrings:
    """Release text up to the first complete stop string, however the text is cut into pieces."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> ReleasedText:
        """Add text; return the text that is certain. A suffix that may become a stop string is held back."""
        if not self._stops:
            return ReleasedText(text, None)
        text = self._held + text
        matches = [(index + len(stop), index, stop) for stop in self._stops if (index := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            _, index, stop = min(matches)
            return ReleasedText(text[:index], stop)
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                self._held = text[-length:]
                return ReleasedText(text[:-length], None)
        self._held = ""
        return ReleasedText(text, None)

    def flush(self) -> str:
        """Return the held-back text, which did not become a stop string."""
        held, self._held = self._held, ""
        return held
