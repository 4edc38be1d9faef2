"""What prompts have in common is computed once: a radix tree over tokens whose nodes hold their keys and values.

It knows nothing of engines: segments come in and go out, and a ledger says how many bytes may stay.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from edgekit.errors import EdgekitError, InvalidInput, clip

if TYPE_CHECKING:
    from edgekit.interfaces import Segment, State
    from edgekit.runtime.ledger import Ledger

_WIDTH = array("i").itemsize


class PrefixKey(NamedTuple):
    """Who may share: nothing passes from one tenant, adapter or cache width to another."""

    tenant: str
    adapter: str | None
    kv_bits: int


class Node:
    """A run of tokens that follows its parent's, and what the engine keeps of it."""

    __slots__ = ("children", "parent", "pins", "segment", "tokens")

    def __init__(self, parent: Node | None, tokens: bytes, segment: Segment | None) -> None:
        self.parent, self.tokens, self.segment = parent, tokens, segment
        self.children: dict[bytes, Node] = {}
        self.pins = 0

    @property
    def count(self) -> int:
        return len(self.tokens) // _WIDTH


class Hit(NamedTuple):
    """The longest resident prefix: runs in order, of which the last may be used in part."""

    tokens: int
    runs: tuple[tuple[Segment, int], ...]


class Prefixes:
    """The tree. Bytes are taken from the ledger; what was used least recently goes first, pinned runs never."""

    def __init__(self, ledger: Ledger, most_bytes: int | None = None) -> None:
        self._ledger, self.most_bytes = ledger, most_bytes
        self._roots: dict[PrefixKey, Node] = {}
        # Oldest first. A parent is always touched after its children, so the oldest run that nobody pinned is a leaf.
        self._ages: OrderedDict[Node, None] = OrderedDict()
        self.bytes = self.queries = self.hits = self.hit_tokens = self.asked_tokens = self.failures = 0

    def __len__(self) -> int:
        return len(self._ages)

    def match(self, key: PrefixKey, tokens: Sequence[int], most_tokens: int) -> Hit:
        """What is resident of the first `most_tokens` tokens; it counts as used now."""
        wanted = array("i", tokens[:most_tokens]).tobytes()
        path, runs, found = [], [], 0
        for node, common in self._walk(key, wanted):
            path.append(node)
            assert node.segment is not None
            runs.append((node.segment, common))
            found += common
        self._touch(path)
        self.queries += 1
        self.hits += found > 0
        self.hit_tokens += found
        self.asked_tokens += len(tokens)
        return Hit(found, tuple(runs))

    def known(self, key: PrefixKey, tokens: Sequence[int]) -> int:
        """How many tokens at the beginning are resident."""
        return sum(common for _, common in self._walk(key, array("i", tokens).tobytes()))

    def insert(self, key: PrefixKey, tokens: Sequence[int], segment: Segment) -> bool:
        """Keep `segment`, the last part of `tokens`; what stands before it must be resident. No: there is no room."""
        data = array("i", tokens).tobytes()
        start = len(data) - segment.tokens * _WIDTH
        path = list(self._walk(key, data))
        resident = sum(common for _, common in path) * _WIDTH
        if resident < start or segment.tokens == 0:
            return False
        self._touch([node for node, _ in path])
        if resident == len(data):
            return True
        if resident > start:
            segment = segment.split((resident - start) // _WIDTH)[1]
        if not self._take_beside(path, segment.bytes):
            return False
        parent = self._roots.setdefault(key, Node(None, b"", None))
        if path:
            last, common = path[-1]
            parent = last if common == last.count else self._cut(last, common)
        rest = data[resident:]
        node = Node(parent, rest, segment)
        parent.children[rest[:_WIDTH]] = node
        self._ages[node] = None
        self._touch(self._upwards(node))
        return True

    def make_room(self, key: PrefixKey, tokens: Sequence[int], wanted_bytes: int) -> bool:
        """Let go of what must go before that many bytes can be kept for `tokens`: before they are there, not after."""
        path = list(self._walk(key, array("i", tokens).tobytes()))
        if not self._take_beside(path, wanted_bytes):
            return False
        self._ledger.give("prefixes", wanted_bytes)
        self.bytes -= wanted_bytes
        return True

    def pin(self, key: PrefixKey, tokens: Sequence[int]) -> int:
        """Keep what is resident of `tokens` until `unpin` of as many tokens; how many those are."""
        path = list(self._walk(key, array("i", tokens).tobytes()))
        if path and path[-1][1] < path[-1][0].count:
            path[-1] = (self._cut(*path[-1]), path[-1][1])
        for node, _ in path:
            node.pins += 1
        self._touch([node for node, _ in path])
        return sum(common for _, common in path)

    def unpin(self, key: PrefixKey, tokens: Sequence[int]) -> None:
        """The same tokens that were pinned: their runs may have been cut meanwhile, never dropped."""
        for node, _ in self._walk(key, array("i", tokens).tobytes()):
            node.pins -= 1

    def shrink(self, wanted_bytes: int) -> int:
        """Let go of at least that many bytes where that many are not pinned; how many it were."""
        freed = 0
        while freed < wanted_bytes:
            node = next((one for one in self._ages if not one.pins and not one.children), None)
            if node is None:
                break
            freed += self._drop(node)
        return freed

    def forget(self, adapter: str) -> None:
        """Let go of what was computed with it: another may come under its name. Refused while some of it is pinned."""
        mine = {key: root for key, root in self._roots.items() if key.adapter == adapter}
        nodes = [node for root in mine.values() for node in _below(root)]
        if any(node.pins for node in nodes):
            raise InvalidInput(f"adapter {clip(adapter)}: a prompt is pinned with it; unpin it first")
        for node in reversed(nodes):
            self._drop(node)

    def runs(self) -> Iterator[tuple[PrefixKey, list[int], Segment]]:
        """Every run with all tokens from the beginning, parents before children."""
        for key, root in self._roots.items():
            waiting = [(root, b"")]
            while waiting:
                node, before = waiting.pop()
                data = before + node.tokens
                if node.segment is not None:
                    yield key, array("i", data).tolist(), node.segment
                waiting += [(child, data) for child in node.children.values()]

    def _walk(self, key: PrefixKey, wanted: bytes) -> Iterator[tuple[Node, int]]:
        """The runs that agree with `wanted` from its beginning, each with how many of its tokens do."""
        node, place = self._roots.get(key), 0
        while node is not None and place < len(wanted):
            node = node.children.get(wanted[place : place + _WIDTH])
            if node is None:
                return
            common = _common(node.tokens, wanted[place : place + len(node.tokens)])
            yield node, common // _WIDTH
            if common < len(node.tokens):
                return
            place += common

    def _cut(self, node: Node, count: int) -> Node:
        """Cut a run in two after `count` tokens; the first part, which takes its place."""
        assert node.segment is not None and node.parent is not None
        before = node.segment.bytes
        first, second = node.segment.split(count)
        head = Node(node.parent, node.tokens[: count * _WIDTH], first)
        head.pins = node.pins
        node.parent.children[head.tokens[:_WIDTH]] = head
        node.parent, node.tokens, node.segment = head, node.tokens[count * _WIDTH :], second
        head.children[node.tokens[:_WIDTH]] = node
        self._ages[head] = None
        assert first.bytes + second.bytes == before
        return head

    def _take_beside(self, path: Sequence[tuple[Node, int]], wanted_bytes: int) -> bool:
        """As `_take`, where making room must not take what the new run follows."""
        for node, _ in path:
            node.pins += 1
        try:
            return self._take(wanted_bytes)
        finally:
            for node, _ in path:
                node.pins -= 1

    def _take(self, wanted_bytes: int) -> bool:
        if self.most_bytes is not None:
            if wanted_bytes > self.most_bytes:
                return False
            self.shrink(self.bytes + wanted_bytes - self.most_bytes)
            if self.bytes + wanted_bytes > self.most_bytes:
                return False
        missing = self._ledger.missing(wanted_bytes)
        if (missing and self.shrink(missing) < missing) or not self._ledger.take("prefixes", wanted_bytes):
            return False
        self.bytes += wanted_bytes
        return True

    def _drop(self, node: Node) -> int:
        assert node.parent is not None and node.segment is not None
        size = node.segment.bytes
        del node.parent.children[node.tokens[:_WIDTH]], self._ages[node]
        self._ledger.give("prefixes", size)
        self.bytes -= size
        if node.parent.parent is None and not node.parent.children:
            self._roots = {key: root for key, root in self._roots.items() if root is not node.parent}
        return size

    def _upwards(self, node: Node) -> list[Node]:
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def _touch(self, path: Sequence[Node]) -> None:
        """Used now; `path` runs from the root downwards."""
        for node in reversed(path):
            self._ages.move_to_end(node)


class Reuse:
    """One request's way to the tree."""

    def __init__(self, prefixes: Prefixes, key: PrefixKey) -> None:
        self._prefixes, self._key = prefixes, key

    def restore(self, state: State, tokens: Sequence[int], most_tokens: int) -> int:
        """Put the longest resident prefix into an empty state; how many tokens need not be fed."""
        hit = self._prefixes.match(self._key, tokens, most_tokens)
        for segment, count in hit.runs:
            state.restore(segment if count == segment.tokens else segment.head(count))
        return hit.tokens

    def keep(self, state: State, tokens: Sequence[int]) -> None:
        """Keep what the state holds of `tokens`, all of which it was fed and none of which it has evicted."""
        known = self._prefixes.known(self._key, tokens)
        if known == len(tokens):
            return
        try:
            wanted = state.save(known, known + 1).bytes * (len(tokens) - known)
            if self._prefixes.make_room(self._key, tokens, wanted):
                self._prefixes.insert(self._key, tokens, state.save(known, len(tokens)))
        except EdgekitError:
            self._prefixes.failures += 1  # a prefix that is not kept costs time later and no answer now


def _below(root: Node) -> list[Node]:
    """Every run under a root, parents before children."""
    found = list(root.children.values())
    for node in found:
        found += node.children.values()
    return found


def _common(one: bytes, other: bytes) -> int:
    """How many bytes of whole tokens both begin with. Halving compares blocks, which is quicker than token by token."""
    low, high = 0, min(len(one), len(other)) // _WIDTH
    if one[: high * _WIDTH] == other[: high * _WIDTH]:
        return high * _WIDTH
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * _WIDTH : middle * _WIDTH] == other[low * _WIDTH : middle * _WIDTH]:
            low = middle
        else:
            high = middle - 1
    return low * _WIDTH
