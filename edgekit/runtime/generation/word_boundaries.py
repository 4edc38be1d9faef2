r"""Rewrite patterns with \b and \B as patterns without them, which llguidance needs."""

from __future__ import annotations

import re

from edgekit.errors import InvalidInput, quote_short
from edgekit.runtime.generation.pattern_parts import (
    Alternatives,
    Boundary,
    Chain,
    Character,
    Choice,
    Loop,
    PatternNode,
    PlainPart,
    PlainSequence,
    Repeat,
    TextState,
    any_of,
    grouped,
)

MAX_PATTERN = 4096
MAX_NESTING = 50
MAX_REPEATS = 1000  # of a part with boundaries, which is written out so often
_ESCAPE = re.compile(
    r"\\(?:x\{[0-9A-Fa-f]+\}|x[0-9A-Fa-f]{2}|u\{[0-9A-Fa-f]+\}|u[0-9A-Fa-f]{4}|[pP]\{[^}]*\}|[pP].|.)", re.S
)
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d+)(,?)(\d*)\})\??")
_GROUP = re.compile(r"\((?:\?(?::|P?<[A-Za-z_]\w*>))?")


def without_boundaries(pattern: str, *, searched: bool) -> str:
    """Return a pattern without word boundaries that matches the same texts.

    A `searched` pattern is found anywhere in a text unless ^ and $ hold it, as in JSON Schema; the result begins with ^
    and ends with $.
    """
    if len(pattern) > MAX_PATTERN:
        raise InvalidInput(
            rf"a pattern with \b or \B has {len(pattern):,} characters; at most {MAX_PATTERN:,} are read"
        )
    anywhere = Repeat(Character(r"[\s\S]"), 0, None) if searched else PlainSequence([])
    node = _Reader(pattern, anywhere).read()
    row = node.moves(TextState(False, None))
    ended = any_of(text for state, text in row.items() if state.next is not True)
    if ended is None:
        raise InvalidInput(
            f"pattern {quote_short(pattern)}: no text can match it: a boundary has a word's character on one side alone"
        )
    return f"^{grouped(ended)}$" if searched else ended


class _Reader:
    """Reads a pattern, in which `as_ecma` has written out the escapes, into nodes."""

    def __init__(self, pattern: str, anywhere: PlainPart) -> None:
        self._pattern, self._anywhere = pattern, anywhere
        self._place = self._nesting = 0

    def read(self) -> PatternNode:
        node = self._alternatives()
        if self._place < len(self._pattern):
            raise self._refusal("a bracket closes that was not opened")
        return node

    def _alternatives(self) -> PatternNode:
        choices = [self._chain()]
        while self._pattern.startswith("|", self._place):
            self._place += 1
            choices.append(self._chain())
        if len(choices) == 1:
            return choices[0]
        parts = [node for node in choices if isinstance(node, PlainPart)]
        return Choice(parts) if len(parts) == len(choices) else Alternatives(choices)

    def _chain(self) -> PatternNode:
        nodes: list[PatternNode] = []
        is_outermost = self._nesting == 0
        if is_outermost and not self._took("^"):
            nodes.append(self._anywhere)
        while self._place < len(self._pattern) and self._pattern[self._place] not in "|)":
            if is_outermost and re.match(r"\$(?:\||$)", self._pattern[self._place :]):
                self._place += 1
                break
            nodes.append(self._repeated(self._atom()))
        else:
            if is_outermost:
                nodes.append(self._anywhere)
        parts = [node for node in nodes if isinstance(node, PlainPart)]
        return PlainSequence(parts) if len(parts) == len(nodes) else Chain(nodes)

    def _atom(self) -> PatternNode:
        letter = self._pattern[self._place]
        if letter == "\\":
            return self._escape()
        if letter == "(":
            return self._group()
        if letter == "[":
            return self._class()
        if letter in "^$*+?{":
            raise self._refusal(f"{letter} cannot stand there beside \\b or \\B")
        self._place += 1
        return Character(letter)

    def _escape(self) -> PatternNode:
        match = _ESCAPE.match(self._pattern, self._place)
        if match is None:
            raise self._refusal("a backslash ends it")
        self._place = match.end()
        if match[0] in (r"\b", r"\B") and not self._pattern.startswith("{", self._place):
            return Boundary(match[0] == r"\b")
        if match[0][1] in "bBAzZG<>" or match[0][1].isdigit():
            raise self._refusal(f"{match[0]} cannot stand beside \\b or \\B")
        return Character(match[0])

    def _group(self) -> PatternNode:
        match = _GROUP.match(self._pattern, self._place)
        assert match is not None  # a bracket is open
        self._place = match.end()
        if self._pattern.startswith("?", self._place):
            raise self._refusal("flags and look-around cannot stand beside \\b or \\B")
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise self._refusal(f"more than {MAX_NESTING} groups lie in each other")
        node = self._alternatives()
        self._nesting -= 1
        if not self._took(")"):
            raise self._refusal("a group is not closed")
        return node

    def _class(self) -> PatternNode:
        begin, depth = self._place, 0
        while True:
            match = re.compile(r"\\.|\[\^?\]?|\[:\^?[a-z]+:\]|.", re.S).match(self._pattern, self._place)
            if match is None:
                raise self._refusal("a class is not closed")
            self._place = match.end()
            depth += 1 if match[0][0] == "[" and match[0][-2:] != ":]" else -1 if match[0] == "]" else 0
            if depth == 0:
                return Character(self._pattern[begin : self._place])

    def _repeated(self, node: PatternNode) -> PatternNode:
        while match := _QUANTIFIER.match(self._pattern, self._place):
            self._place = match.end()
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(match[0][0], (0, None))
            if match[1]:
                least, most = int(match[1]), int(match[3]) if match[3] else None if match[2] else int(match[1])
            if most is not None and most < least:
                raise self._refusal(f"{match[0]} has its bounds in the wrong order")
            if isinstance(node, PlainPart):
                node = Repeat(node, least, most)
            elif max(least, most or 0) > MAX_REPEATS:
                raise self._refusal(f"{match[0]} repeats a boundary more than {MAX_REPEATS:,} times")
            else:
                node = Loop(node, least, most)
        return node

    def _took(self, letter: str) -> bool:
        found = self._pattern.startswith(letter, self._place)
        self._place += found
        return found

    def _refusal(self, reason: str) -> InvalidInput:
        return InvalidInput(f"pattern {quote_short(self._pattern)}: cannot be compiled: {reason}")
