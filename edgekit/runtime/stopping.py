"""When an answer ends: stop strings (held back while they may still come), stop tokens and the token limit.

Pure text and numbers: it knows nothing of tokenizers or engines.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from edgekit.frozen import Frozen

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


class Stopping(Frozen):
    """What ends an answer. The stop string or token itself is never part of it."""

    max_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None  # None: as many as the context has room for
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...], Field(max_length=16, strict=False)
    ] = ()
    stop_tokens: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=256, strict=False)] = ()
    ignore_eos: bool = False


class Passed(NamedTuple):
    """Text that may be shown, and whether a stop string ended it."""

    text: str
    stopped: bool


class StopStrings:
    """Lets text through until a stop string is complete. The first to be complete counts, however the text is cut."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> Passed:
        """`text`, less what may still become a stop string."""
        if not self._stops:
            return Passed(text, False)
        text = self._held + text
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return Passed(text[: min(found)[1]], True)
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                self._held = text[-length:]
                return Passed(text[:-length], False)
        self._held = ""
        return Passed(text, False)

    def flush(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held
