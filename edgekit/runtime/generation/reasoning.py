"""Separate reasoning from content: reasoning stands between `<think>` and `</think>` at the start of an answer."""

from __future__ import annotations

from typing import Literal, NamedTuple

THINKING = "<think>"  # a chat template may end the prompt with it, so that every answer begins with reasoning
THINKING_END = "</think>"
_BEGIN, _END = THINKING, THINKING_END


class SplitText(NamedTuple):
    """Released text, split into reasoning and content."""

    reasoning: str
    content: str


class ReasoningReader:
    """Split an answer while it is generated. The result does not depend on how the text is cut into pieces.

    `is_inside`: the prompt ended with the opening mark, so the answer begins with reasoning.
    """

    def __init__(self, *, is_inside: bool = False) -> None:
        self._part: Literal["unknown", "reasoning", "content"] = "reasoning" if is_inside else "unknown"
        self._drops_blank_lines = is_inside  # blank lines after a mark belong to no part
        self._held = ""

    def push(self, text: str) -> SplitText:
        """Add text; return the text that is certain. A suffix that may become a mark is held back."""
        if self._part == "unknown":
            text, self._held = self._held + text, ""
            visible = text.lstrip()
            if _BEGIN.startswith(visible):
                self._held = text
                return SplitText("", "")
            self._part = "reasoning" if visible.startswith(_BEGIN) else "content"
            if self._part == "reasoning":
                text, self._drops_blank_lines = visible.removeprefix(_BEGIN), True
        if self._part == "content":
            return SplitText("", self._without_blank_lines(text))
        reasoning, mark, content = (self._held + text).partition(_END)
        if mark:
            self._held = ""
            reasoning = self._without_blank_lines(reasoning.rstrip("\n"))
            self._part, self._drops_blank_lines = "content", True
            return SplitText(reasoning, self._without_blank_lines(content))
        end = next((n for n in range(min(len(_END) - 1, len(reasoning)), 0, -1) if _END.startswith(reasoning[-n:])), 0)
        released = reasoning[: len(reasoning) - end].rstrip("\n")
        self._held = reasoning[len(released) :]
        return SplitText(self._without_blank_lines(released), "")

    def finish(self) -> SplitText:
        """Return the held-back text at the end of the answer."""
        held, self._held = self._held, ""
        return SplitText(held, "") if self._part == "reasoning" else SplitText("", held)

    def _without_blank_lines(self, text: str) -> str:
        if self._drops_blank_lines:
            text = text.lstrip("\n")
            self._drops_blank_lines = not text
        return text
