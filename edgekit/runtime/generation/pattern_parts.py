r"""Parts of a pattern that know which texts lead from one kind of character to another.

A word boundary asks for the characters on both of its sides. So a pattern is followed through states: whether the last
character belongs to a word, and what the next one has to be. The texts that lead from one state to another are a
pattern without boundaries, since the first and last character of every part can be restricted to one kind.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from edgekit.errors import InvalidInput

MAX_TEXT = 64 << 10  # characters of a rewritten pattern
WORD = "0-9A-Za-z_"  # members of classes, as ECMA-262 means \w and \s
BLANK = r"\t-\r\x20\xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_ONLY_OTHER = {f"[^{WORD}]", f"[{BLANK}]"}
_MEMBER = re.compile(r"[0-9]-[0-9]|[A-Z]-[A-Z]|[a-z]-[a-z]|[^-&~^\\[\]]")  # of a class, all of one kind
_CLASS = re.compile(rf"\[(?:{_MEMBER.pattern})+\]")

IsWord = bool


class TextState(NamedTuple):
    """Where a text stands: its last character belongs to a word or not, and so must the next one (None: any)."""

    last: IsWord
    next: IsWord | None


TextRow = dict[TextState, str]  # the texts that lead to each state


class PatternNode(ABC):
    """A part of a pattern."""

    def moves(self, state: TextState) -> TextRow:
        """Return the texts that lead from `state` to others."""
        if state not in self._rows:
            self._rows[state] = self._moves(state)
        return self._rows[state]

    @abstractmethod
    def _moves(self, state: TextState) -> TextRow: ...

    @cached_property
    def _rows(self) -> dict[TextState, TextRow]:
        """Rows by state, since nested loops ask for the same ones again."""
        return {}


class PlainPart(PatternNode):
    """A part without boundaries."""

    text: str
    may_be_empty: bool

    def between(self, first: IsWord | None, last: IsWord | None) -> str | None:
        """Return a pattern for the texts of at least one character whose first and last characters are of these kinds.

        A kind of None is any; the result is None where no text is left.
        """
        if (first, last) not in self._known:
            self._known[first, last] = self._between(first, last)
        return self._known[first, last]

    @abstractmethod
    def _between(self, first: IsWord | None, last: IsWord | None) -> str | None: ...

    @cached_property
    def _known(self) -> dict[tuple[IsWord | None, IsWord | None], str | None]:
        return {}

    def _moves(self, state: TextState) -> TextRow:
        row = {state: ""} if self.may_be_empty else {}
        for last in (True, False):
            _add(row, TextState(last, None), self.between(state.next, last))
        return row


class Character(PlainPart):
    may_be_empty = False

    def __init__(self, text: str) -> None:
        self.text = r"[^\n]" if text == "." else text

    def _between(self, first: IsWord | None, last: IsWord | None) -> str | None:
        if first is None or last is None or first == last:
            return self._of_kind(last if first is None else first)
        return None

    def _of_kind(self, kind: IsWord | None) -> str | None:
        known = self._kind
        if kind is None or known == kind:
            return self.text
        if known is not None:
            return None
        return f"[{self.text}&&[{WORD}]]" if kind else f"[{self.text}--[{WORD}]]"

    @cached_property
    def _kind(self) -> IsWord | None:
        """The kind of every character that matches, where that is certain."""
        if self.text in _ONLY_OTHER:
            return False
        is_alone = len(self.text) == 1 or re.fullmatch(r"\\\W", self.text)
        members = [self.text[-1]] if is_alone else _MEMBER.findall(self.text) if _CLASS.fullmatch(self.text) else []
        kinds = {re.match(f"[{WORD}]", member) is not None for member in members}
        return kinds.pop() if len(kinds) == 1 else None


class PlainSequence(PlainPart):
    def __init__(self, parts: Sequence[PlainPart]) -> None:
        self._parts = parts
        self.text = _bounded("".join(part.text for part in parts))
        self.may_be_empty = all(part.may_be_empty for part in parts)

    def _between(self, first: IsWord | None, last: IsWord | None) -> str | None:
        if first is None and last is None and not self.may_be_empty:
            return self.text
        return any_of(self._spans(first, last))

    def _spans(self, first: IsWord | None, last: IsWord | None) -> Iterator[str | None]:
        """Texts by the parts that write their first and last character; those outside are empty."""
        parts = self._parts
        least = max((place for place, part in enumerate(parts) if not part.may_be_empty), default=0)
        ends = [(place, parts[place].between(None, last)) for place in range(least, len(parts))]
        ends = [(place, text) for place, text in ends if text is not None]
        for begin, part in enumerate(parts):
            start = part.between(first, None)
            for end, text in ends if start is not None else ():
                if end > begin:
                    yield _joined(start, *(part.text for part in parts[begin + 1 : end]), text)
            if begin >= least:
                yield part.between(first, last)
            if not part.may_be_empty:
                return


class Choice(PlainPart):
    def __init__(self, parts: Sequence[PlainPart]) -> None:
        self._parts = parts
        self.text = any_of(part.text for part in parts) or ""
        self.may_be_empty = any(part.may_be_empty for part in parts)

    def _between(self, first: IsWord | None, last: IsWord | None) -> str | None:
        return any_of(part.between(first, last) for part in self._parts)


class Repeat(PlainPart):
    """A part from `least` to `most` times; None: without end."""

    def __init__(self, part: PlainPart, least: int, most: int | None) -> None:
        self._part, self._least, self._most = part, 0 if part.may_be_empty else least, most
        self.text = _bounded(_repeated(part.text, least, most))
        self.may_be_empty = self._least == 0 or most == 0

    def _between(self, first: IsWord | None, last: IsWord | None) -> str | None:
        if self._most == 0:
            return None
        most = None if self._most is None else self._most - 1
        if first is None:
            return _joined(_repeated(self._part.text, max(self._least - 1, 0), most), self._part.between(None, last))
        if last is None:
            return _joined(self._part.between(first, None), _repeated(self._part.text, max(self._least - 1, 0), most))
        once = self._part.between(first, last) if self._least < 2 else None
        if most == 0:
            return once
        middle = _repeated(self._part.text, max(self._least - 2, 0), None if most is None else most - 1)
        return any_of((once, _joined(self._part.between(first, None), middle, self._part.between(None, last))))


class Boundary(PatternNode):
    def __init__(self, is_one: bool) -> None:
        self._is_one = is_one

    def _moves(self, state: TextState) -> TextRow:
        following = state.last != self._is_one
        return {} if state.next == (not following) else {TextState(state.last, following): ""}


class Chain(PatternNode):
    def __init__(self, nodes: Sequence[PatternNode]) -> None:
        self._nodes: list[PatternNode] = []
        # Neighbours without boundaries become one part: following each by itself would double the text.
        for is_part, run in groupby(nodes, lambda node: isinstance(node, PlainPart)):
            found = list(run)
            self._nodes += (
                [PlainSequence([node for node in found if isinstance(node, PlainPart)])] if is_part else found
            )

    def _moves(self, state: TextState) -> TextRow:
        row = {state: ""}
        for node in self._nodes:
            row = _after(row, node)
        return row


class Alternatives(PatternNode):
    def __init__(self, nodes: Sequence[PatternNode]) -> None:
        self._nodes = nodes

    def _moves(self, state: TextState) -> TextRow:
        row: TextRow = {}
        for node in self._nodes:
            for reached, text in node.moves(state).items():
                _add(row, reached, text)
        return row


class Loop(PatternNode):
    """A node with boundaries, from `least` to `most` times."""

    def __init__(self, node: PatternNode, least: int, most: int | None) -> None:
        self._node, self._least, self._most = node, least, most

    def _moves(self, state: TextState) -> TextRow:
        row = {state: ""}
        for _ in range(self._least):
            row = _after(row, self._node)
        if self._most is None:
            return self._without_end(row)
        for _ in range(self._most - self._least):
            more = _after(row, self._node)
            for reached, text in row.items():
                _add(more, reached, text)
            row = more
        return row

    def _without_end(self, row: TextRow) -> TextRow:
        """Close the loop as Kleene does: state by state, the ways that may pass through it."""
        ways: dict[TextState, TextRow] = {}
        waiting = list(row)
        while waiting:
            state = waiting.pop()
            if state not in ways:
                ways[state] = dict(self._node.moves(state))
                waiting += ways[state]
        # First the states after a boundary: they are reached by the empty text, so passing them costs least.
        for through in sorted(ways, key=lambda state: state.next is None):
            around = _repeated(ways[through].get(through, ""), 0, None)
            for begin in ways:
                if begin == through or (way := ways[begin].get(through)) is None:
                    continue
                for reached, text in list(ways[through].items()):
                    if reached != through:
                        _add(ways[begin], reached, _joined(way, around, text))
                ways[begin][through] = _bounded(way + around)
            ways[through] = {
                reached: around if reached == through else _bounded(around + text)
                for reached, text in ways[through].items()
            }
        closed = dict(row)
        for begin, before in row.items():
            for reached, text in ways[begin].items():
                _add(closed, reached, _joined(before, text))
        return closed


def _after(row: TextRow, node: PatternNode) -> TextRow:
    """Return the row of the texts that `node` adds to."""
    reached: TextRow = {}
    for state, before in row.items():
        for after, text in node.moves(state).items():
            _add(reached, after, _joined(before, text))
    return reached


def _add(row: TextRow, state: TextState, text: str | None) -> None:
    if text is not None:
        row[state] = any_of((row.get(state), text)) or ""


def any_of(texts: Iterable[str | None]) -> str | None:
    found: dict[str, None] = {}
    size = 0
    for text in texts:
        if text is not None and text not in found:
            found[text] = None
            size += len(_bounded(text)) + 1
            if size > MAX_TEXT:
                raise _too_large()
    return (grouped("|".join(found)) if len(found) > 1 else next(iter(found))) if found else None


def _joined(*texts: str | None) -> str | None:
    return None if None in texts else _bounded("".join(text or "" for text in texts))


def _repeated(text: str, least: int, most: int | None) -> str:
    if most == 0 or not text:
        return ""
    count = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}.get((least, most))
    if count is None:
        count = f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"
    return f"{grouped(text)}{count}" if count else text


def grouped(text: str) -> str:
    return f"(?:{text})"


def _bounded(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise _too_large()
    return text


def _too_large() -> InvalidInput:
    return InvalidInput(r"a pattern with \b or \B is too large once they are written out; use fewer of them")
