"""Stream the arguments of tool calls while the model writes them as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

_ARGUMENTS = ("arguments", "parameters")
_NAMED = re.compile(r"\s*([\w.-]{1,128})(?:\[CALL_ID\][\w-]*)?\[ARGS\]")  # Mistral, before the arguments


@dataclass(frozen=True)
class ToolCallDelta:
    """A part of a call's arguments, as it was written."""

    index: int
    """The index of the call in `answer.tool_calls`."""
    id: str
    name: str
    arguments: str
    """The next part of the JSON text. The parts of one call, joined, are its arguments."""


class WrittenArguments(NamedTuple):
    """New text of a call's arguments; `call` is the index of the call in its region."""

    call: int
    name: str
    text: str


@dataclass
class _Object:
    """An object or list that is open at the reading position."""

    is_list: bool
    key: str = ""
    name: str = ""


class ArgumentScanner:
    """Read a region of JSON calls piece by piece, and return the text of their arguments.

    Arguments are returned only after the call's name, so not for calls that write the arguments first.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._open: list[_Object] = []
        self._string: str | None = None  # the JSON string that is open, with its first quote
        self._escaped = False
        self._after_string = ""  # the last whole string, until something follows it
        self._name = ""  # name of the call whose arguments are being written
        self._depth = 0  # open brackets inside the arguments
        self._call = -1
        self._head: str | None = ""  # text before the first JSON value; None: the value has begun
        self._is_dead = False

    @property
    def is_in_string(self) -> bool:
        """True if the text ends inside a JSON string, where a marker would be part of the string."""
        return self._string is not None and not self._is_dead

    def push(self, text: str) -> list[WrittenArguments]:
        """Add text; return the new parts of arguments."""
        written: list[WrittenArguments] = []
        for char in text:
            if self._is_dead:
                break
            was_inside, call, name = bool(self._name), self._call, self._name
            self._step(char)
            if was_inside or self._name:
                call, name = (call, name) if was_inside else (self._call, self._name)
                if written and written[-1].call == call:
                    written[-1] = written[-1]._replace(text=written[-1].text + char)
                else:
                    written.append(WrittenArguments(call, name, char))
        return written

    def _step(self, char: str) -> None:
        if self._head is not None and not self._begin(char):
            return
        if self._string is not None:
            self._in_string(char)
        elif char == '"':
            self._string = '"'
        elif char in "{[":
            self._enter(char == "[")
        elif char in "}]":
            self._leave()
        elif char == ":" and self._open and not self._name:
            self._open[-1].key = self._after_string
        elif char == "," and self._open and not self._name:
            self._take_name()
            self._open[-1].key = ""

    def _begin(self, char: str) -> bool:
        """Return True if JSON begins with this character; a region of anything else is ignored."""
        assert self._head is not None
        if char in "{[" and not self._head.strip():
            self._head = None
            return True
        if char == "{" and (named := _NAMED.fullmatch(self._head.rstrip())) and named[1] in self._names:
            self._head = None
            self._open.append(_Object(is_list=False, key=_ARGUMENTS[0], name=named[1]))
            return True
        self._head += char
        self._is_dead = len(self._head) > 256
        return False

    def _in_string(self, char: str) -> None:
        assert self._string is not None
        if not self._name:
            self._string += char
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            if not self._name:
                self._after_string = _text_of(self._string)
                self._take_name()
            self._string = None

    def _take_name(self) -> None:
        if self._open and self._open[-1].key == "name":
            self._open[-1].name = self._after_string

    def _enter(self, is_list: bool) -> None:
        if self._name:
            self._depth += 1
            return
        here = self._open[-1] if self._open else None
        if here is not None and here.key in _ARGUMENTS and here.name in self._names and not is_list:
            self._name, self._depth, self._call = here.name, 1, self._call + 1
            return
        # A published template shows its calls with doubled braces.
        is_doubled = len(self._open) == 1 and not (is_list or self._open[0].key or self._after_string)
        if here is not None and not here.is_list and here.key != "function" and not is_doubled:
            self._is_dead = True  # arguments before their name, or no call
            return
        self._open.append(_Object(is_list))

    def _leave(self) -> None:
        if self._name:
            self._depth -= 1
            if not self._depth:
                self._name = ""
        elif self._open:
            self._open.pop()


def _text_of(string: str) -> str:
    try:
        return str(json.loads(string))
    except ValueError:
        return ""
