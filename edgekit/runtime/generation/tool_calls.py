"""Read the tool calls of an answer, whole or while it is generated."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from edgekit.runtime.generation.tool_call_deltas import ArgumentScanner, ToolCallDelta
from edgekit.runtime.generation.tool_call_formats import (
    FORMATS,
    HERMES,
    MARKED,
    PHI,
    CallFormat,
    ToolCall,
    find_end_marker,
)

MAX_CALLS = 128
# Text before JSON calls, including none at the start of an answer that is JSON alone.
_JSON_OPENING = re.compile(
    r"<tool_call>|<\|tool_call\|>|functools(?=\[)|\[TOOL_CALLS\]|<\|python_tag\|>|```(?:tool_call|json)\s*\n|\A\s*(?=\{|\[\s*\{)"
)
_BARE_CALLS = re.compile(r"\s*(?:\{|\[\s*\{)")
_LONGEST_OPENING = 32
_MISTRAL = "[TOOL_CALLS]"
# Possible starts of a call. The last alternative is an end of the text that may become one of the others.
_OPENING = re.compile(
    r"<tool_call>|\[TOOL_CALLS\]|<\|tool_call\|>|functools\[|<\|python_tag\|>|```(?:tool_code|tool_call|json|python)\s*\n"
    r"|(?:<(?:t(?:o(?:o(?:l(?:_(?:c(?:a(?:l(?:l)?)?)?)?)?)?)?)?)?|\[(?:T[A-Z_]*)?|<\|[a-z_]*\|?|f[a-z]{0,8}|`{1,3}[a-z_]{0,9}\s*)\Z"
)
_FENCE = re.compile("```")
_CLOSING = {
    "<tool_call>": HERMES.end,
    "<|tool_call|>": PHI.end,
    **{f"```{name}": _FENCE for name in ("tool_code", "tool_call", "json", "python")},
}


class ParsedAnswer(NamedTuple):
    """The text of an answer without its tool calls, and the calls."""

    content: str
    calls: tuple[ToolCall, ...]


def tool_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return the names of tools, described as `{"type": "function", "function": {...}}` or by the function alone."""
    described = [tool.get("function", tool) for tool in tools]
    return frozenset(str(one["name"]) for one in described if isinstance(one, Mapping) and "name" in one)


def parse_tool_calls(text: str, names: Collection[str]) -> ParsedAnswer:
    """Return the calls of tools named `names`, and the text without them. Unknown and incomplete calls stay text.

    `chat` does this if `tools` are given. Call it yourself if the chat template takes no tools and you describe them in
    a message.
    """
    parsed = _parsed(text, names, FORMATS, "")
    return parsed._replace(content=parsed.content.strip()) if parsed.calls else parsed


class ToolCallReader:
    """Find the tool calls of an answer while it is generated.

    A call with an end marker is returned at its marker, a call in any other format by `finish`. Text that may be part
    of a call is held back, and `deltas` returns JSON arguments as they are written. Ids are derived from `id_seed`, so
    that the same answer to the same prompt has the same ids.
    """

    def __init__(self, names: Collection[str], id_seed: str = "") -> None:
        self.names = names
        self.count = 0  # calls returned so far
        self.content = self.rest = ""  # the text without the calls, and its unreleased end; set by `finish`
        self._id_seed = id_seed
        self._text = ""
        self._read_to = 0  # the end of the last end marker
        self._format: tuple[str, CallFormat] | None = None  # format of the first returned call
        self._decided, self._decided_to = "", 0  # text that is no call, and its end in the answer
        self._released = 0  # characters of `_decided` that `take_content` returned
        self._scanner: ArgumentScanner | None = None  # reads the calls that are being written
        self._scanned_to = 0
        self._marked_to = 0  # the end of the last Mistral marker inside an argument
        self._first = 0  # index of the scanner's first call
        self._deltas: list[ToolCallDelta] = []
        self._begun: set[int] = set()  # calls that have deltas

    def deltas(self) -> tuple[ToolCallDelta, ...]:
        """Return the parts of arguments that are new since the last call of this method."""
        taken, self._deltas = tuple(self._deltas), []
        return taken

    def push(self, text: str) -> tuple[ToolCall, ...]:
        """Add text; return the calls that it completes."""
        self._text += text
        calls: tuple[ToolCall, ...] = ()
        for marker, read in self._end_markers():
            start = max(self._read_to, len(self._text) - len(text) - len(marker))
            while (position := self._text.find(marker, start)) >= 0:
                start = position + len(marker)
                self._scan(position)
                if self._scanner and self._scanner.is_in_string:
                    continue  # the marker is part of an argument
                completed = [
                    call for match in read(self._text[self._read_to : start], self.names) for call in match.calls
                ]
                if completed:
                    self._format = (marker, read)
                calls += self._given_out(completed)
                self._begun = {index for index in self._begun if index < self.count}
                self._read_to = self._scanned_to = start
                self._scanner = None
            if self._format:
                break
        self._scan(len(self._text))
        return calls

    def _end_markers(self) -> tuple[tuple[str, CallFormat], ...]:
        if self._format:
            return (self._format,)
        return () if _BARE_CALLS.match(self._text) else MARKED  # markers in an answer of JSON alone are inside strings

    def _scan(self, stop: int) -> None:
        """Follow the arguments of the calls that are open in the text before `stop`."""
        while True:
            if self._scanner is None:
                opening = _JSON_OPENING.search(self._text, self._scanned_to, stop)
                if opening is None:
                    self._scanned_to = max(self._scanned_to, stop - _LONGEST_OPENING)
                    return
                self._scanner, self._scanned_to = ArgumentScanner(self.names), opening.end()
                self._first = max(self.count, len(self._begun))
            # Mistral only marks the beginning of each call.
            end = self._text.find(_MISTRAL, max(self._marked_to, self._scanned_to - len(_MISTRAL) + 1), stop)
            for call, name, text in self._scanner.push(self._text[self._scanned_to : stop if end < 0 else end]):
                index = self._first + call
                self._begun.add(index)
                self._deltas.append(ToolCallDelta(index, _id_of(self._id_seed, index, name), name, text))
            self._scanned_to = max(self._scanned_to, stop if end < 0 else end)
            if end < 0:
                return
            if self._scanner.is_in_string:
                self._marked_to = end + len(_MISTRAL)
            else:
                self._scanner, self._scanned_to = None, end

    def finish(self) -> tuple[ToolCall, ...]:
        """Return the remaining calls at the end of the answer; `rest` then has the last content."""
        parsed = _parsed(self._text, self.names, (self._format[1],) if self._format else FORMATS, self._id_seed)
        self._decided = parsed.content.rstrip() if parsed.calls else parsed.content
        self.rest = self._released_to(len(self._decided))
        self.content = parsed.content.strip() if parsed.calls else parsed.content
        return self._given_out(parsed.calls[self.count :])

    def take_content(self) -> str:
        """Return new text that is certainly not part of a call."""
        while self._decided_to < len(self._text):
            opening = self._next_opening()
            self._decided += self._text[self._decided_to : opening]
            self._decided_to = opening
            closing = self._end_of_block(opening)
            if closing is None:
                break
            if not self._is_call(self._text[opening:closing]):
                self._decided += self._text[opening:closing]
            self._decided_to = closing
        return self._released_to(len(self._decided.rstrip()))  # white space before a call is dropped

    def _released_to(self, stop: int) -> str:
        content, self._released = self._decided[self._released : stop], max(self._released, stop)
        return content

    def _next_opening(self) -> int:
        """Return the next index at which a call may begin; the end of the text if there is none."""
        if self._format is None and self._text.lstrip()[:1] in ("{", "["):
            return self._decided_to  # the whole answer may be calls
        match = _OPENING.search(self._text, self._decided_to)
        return match.start() if match else len(self._text)

    def _end_of_block(self, opening: int) -> int | None:
        """Return the end of the block that begins at `opening`; None if it is open or has to wait for `finish`."""
        match = _OPENING.match(self._text, opening)
        closing = _CLOSING.get(match[0].strip()) if match else None
        if match is None or closing is None or (self._format is None and self._text.lstrip()[:1] in ("{", "[")):
            return None
        end = find_end_marker(self._text, match.end(), closing, is_whole=False)
        if end is None or (closing is _FENCE and self._is_call(self._text[opening : end.end()])):
            return None
        return end.end()

    def _is_call(self, block: str) -> bool:
        formats = (self._format[1],) if self._format else FORMATS
        return any(match.calls for read in formats for match in read(block, self.names))

    def _given_out(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        given = tuple(_with_id(call, self.count + i, self._id_seed) for i, call in enumerate(calls))
        given = given[: MAX_CALLS - self.count]
        for index, call in enumerate(given, self.count):
            if index not in self._begun:  # no deltas came: not JSON, or arguments before the name
                self._begun.add(index)
                self._deltas.append(ToolCallDelta(index, call.id, call.name, json.dumps(call.arguments)))
        self.count += len(given)
        return given


def _parsed(text: str, names: Collection[str], formats: Sequence[CallFormat], id_seed: str) -> ParsedAnswer:
    """Read `text` in the first format that finds a call."""
    for read in formats:
        matches = [match for match in read(text, names) if match.calls]
        if matches:
            content, place = "", 0
            for match in matches:
                content += text[place : match.start]
                place = match.stop
            calls = [call for match in matches for call in match.calls][:MAX_CALLS]
            ids = tuple(_with_id(call, index, id_seed) for index, call in enumerate(calls))
            return ParsedAnswer(content + text[place:], ids)
    return ParsedAnswer(text, ())


def _with_id(call: ToolCall, index: int, seed: str) -> ToolCall:
    """Set the id. Without a seed it depends on the arguments, which tell calls of several answers apart."""
    return call.model_copy(update={"id": _id_of(seed or json.dumps(call.arguments, sort_keys=True), index, call.name)})


def _id_of(seed: str, index: int, name: str) -> str:
    """Return an id of nine characters, since some chat templates accept no other length."""
    return blake2b(f"{seed} {index} {name}".encode("utf-8", "replace"), digest_size=8).hexdigest()[:9]
