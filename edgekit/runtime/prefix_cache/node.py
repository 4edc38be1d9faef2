"""The nodes of the prefix cache's trees."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgekit.contracts.engine import Segment

WIDTH = array("i").itemsize


class Node:
    """A run of tokens that follows its parent's run, with its keys and values."""

    __slots__ = ("children", "parent", "pins", "segment", "tokens")

    def __init__(self, parent: Node | None, tokens: bytes, segment: Segment | None) -> None:
        self.parent, self.tokens, self.segment = parent, tokens, segment
        self.children: dict[bytes, Node] = {}
        self.pins = 0

    @property
    def count(self) -> int:
        return len(self.tokens) // WIDTH

    @property
    def name(self) -> bytes:
        """The node's key among its parent's children: the first token."""
        return self.tokens[:WIDTH]


class WindowNode(Node):
    """The contents of a window after a text; `tokens` is a hash of the text, `read` its number of tokens."""

    __slots__ = ("read",)

    def __init__(self, parent: Node, digest: bytes, read: int, segment: Segment) -> None:
        super().__init__(parent, digest, segment)
        self.read = read

    @property
    def name(self) -> bytes:
        return self.tokens
