"""The prefix cache: a radix tree over tokens, whose nodes have the keys and values of their tokens.

Prompts with the same beginning share them. A budget limits the memory; the least recently used runs are dropped first.
A window drops tokens of long texts, whose keys then have other positions. What it holds after a text cannot be shared
by pieces, so it is kept as a whole, by a hash of the text.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from edgekit.common.log import log
from edgekit.common.units import show_bytes
from edgekit.errors import InvalidInput, quote_short

if TYPE_CHECKING:
    from edgekit.contracts.engine import Segment, State
    from edgekit.contracts.kv_policy import KVEvictionPolicy
    from edgekit.runtime.memory.budget import MemoryBudget

WIDTH = array("i").itemsize
RUN_BYTES = 512  # of a run's node in the tree, without its tokens: 317 to 505 were measured


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


class PrefixKey(NamedTuple):
    """The owner of a tree. Prefixes are shared within one tenant, adapter and width of the cache only.

    With a `policy`, its tree has the contents of that policy's window.
    """

    tenant: str
    adapter: str | None
    kv_bits: int
    policy: KVEvictionPolicy | None = None


class Hit(NamedTuple):
    """The longest cached prefix: segments in order, each with the number of its tokens to use."""

    tokens: int
    runs: tuple[tuple[Segment, int], ...]


class Prefixes:
    """The trees of all keys. Bytes come from the memory budget; pinned runs are never dropped."""

    def __init__(self, budget: MemoryBudget, max_bytes: int | None = None, run_bytes: int = 0) -> None:
        """`max_bytes`: of keys and values; `run_bytes`: what a run takes in addition to them and its tokens."""
        self._budget, self.max_bytes, self._run_bytes = budget, max_bytes, run_bytes
        self.keeps_new = True  # False while memory is short
        self._roots: dict[PrefixKey, Node] = {}
        # Least recently used first. A parent is touched after its children, so the oldest unpinned run is a leaf.
        self._ages: OrderedDict[Node, None] = OrderedDict()
        self.taken_bytes = 0  # with the runs' nodes in the tree
        self.bytes = self.queries = self.hits = self.hit_tokens = self.asked_tokens = self.failures = 0

    def __len__(self) -> int:
        return len(self._ages)

    def match(self, key: PrefixKey, tokens: Sequence[int], max_tokens: int) -> Hit:
        """Find the longest cached prefix of the first `max_tokens` tokens, and mark it as used."""
        data = array("i", tokens[:max_tokens]).tobytes()
        path, runs, hit_tokens = [], [], 0
        for node, common in self._walk(key, data):
            path.append(node)
            assert node.segment is not None
            runs.append((node.segment, common))
            hit_tokens += common
        self._touch(path)
        self._count(hit_tokens, len(tokens))
        return Hit(hit_tokens, tuple(runs))

    def match_window(self, key: PrefixKey, tokens: Sequence[int]) -> Segment | None:
        """Find the kept contents of a window after the longest beginning of `tokens`, and mark them as used."""
        root = self._roots.get(key)
        if root is None:
            return None
        data, digest, place, found = array("i", tokens).tobytes(), hashlib.sha256(), 0, None
        lengths = {node.read for node in root.children.values() if isinstance(node, WindowNode)}
        for read in sorted(length for length in lengths if length <= len(tokens)):
            digest.update(data[place * WIDTH : read * WIDTH])
            place, found = read, root.children.get(digest.copy().digest(), found)
        if not isinstance(found, WindowNode):
            return None
        self._touch([found])
        self._count(found.read, len(tokens))
        return found.segment

    def keep_window(self, key: PrefixKey, tokens: Sequence[int], state: State, cached: int) -> None:
        """Keep the first `cached` tokens that the window of `state` holds after reading `tokens`."""
        digest = hashlib.sha256(array("i", tokens).tobytes()).digest()
        root = self._roots.get(key)
        if root is not None and digest in root.children:
            self._touch([root.children[digest]])
            return
        size, extra = state.save_bytes(0, cached), self._extra_bytes(digest)
        if not self._take(size, extra):
            return
        try:
            segment = state.save(0, cached)
        except BaseException:
            self._give(size, extra)
            raise
        root = self._roots.setdefault(key, Node(None, b"", None))
        node = WindowNode(root, digest, len(tokens), segment)
        root.children[digest] = node
        self._ages[node] = None

    def _count(self, hit_tokens: int, asked_tokens: int) -> None:
        self.queries += 1
        self.hits += hit_tokens > 0
        self.hit_tokens += hit_tokens
        self.asked_tokens += asked_tokens

    def figures(self) -> dict[str, int]:
        """Return the counters by their names in `Metrics`."""
        return {
            "prefix_bytes": self.bytes,
            "prefix_runs": len(self),
            "prefix_queries": self.queries,
            "prefix_hits": self.hits,
            "prefix_hit_tokens": self.hit_tokens,
            "prefix_asked_tokens": self.asked_tokens,
        }

    def num_cached(self, key: PrefixKey, tokens: Sequence[int]) -> int:
        """Return the number of leading tokens that are cached."""
        return sum(common for _, common in self._walk(key, array("i", tokens).tobytes()))

    def insert(self, key: PrefixKey, tokens: Sequence[int], segment: Segment) -> bool:
        """Cache `segment`, the end of `tokens`. False: there is no room, or the tokens before it are not cached."""
        data = array("i", tokens).tobytes()
        start = len(data) - segment.tokens * WIDTH
        path = list(self._walk(key, data))
        cached = sum(common for _, common in path) * WIDTH
        if cached < start or segment.tokens == 0:
            return False
        self._touch([node for node, _ in path])
        if cached == len(data):
            return True
        if cached > start:
            segment = segment.split((cached - start) // WIDTH)[1]
        rest, is_cut = data[cached:], bool(path) and path[-1][1] < path[-1][0].count
        if not self._take_after(path, segment.bytes, self._extra_bytes(rest) + is_cut * self._run_bytes):
            return False
        parent = self._roots.setdefault(key, Node(None, b"", None))
        if path:
            last, common = path[-1]
            parent = self._cut(last, common) if is_cut else last
        node = Node(parent, rest, segment)
        parent.children[rest[:WIDTH]] = node
        self._ages[node] = None
        self._touch(self._upwards(node))
        return True

    def make_room(self, key: PrefixKey, tokens: Sequence[int], size: int) -> bool:
        """Drop runs until `size` bytes fit for `tokens`. Called before they are copied, so that memory never peaks."""
        data = array("i", tokens).tobytes()
        extra = self._extra_bytes(data) + self._run_bytes
        if not self._take_after(list(self._walk(key, data)), size, extra):
            return False
        self._give(size, extra)
        return True

    def pin(self, key: PrefixKey, tokens: Sequence[int]) -> int:
        """Keep the cached prefix of `tokens` until `unpin`; return its number of tokens."""
        path = list(self._walk(key, array("i", tokens).tobytes()))
        if path and path[-1][1] < path[-1][0].count:
            last = path.pop()
            if self._take_after([*path, last], 0, self._run_bytes):
                path.append((self._cut(*last), last[1]))
        for node, _ in path:
            node.pins += 1
        self._touch([node for node, _ in path])
        return sum(common for _, common in path)

    def unpin(self, key: PrefixKey, tokens: Sequence[int]) -> None:
        """Release tokens that were pinned. Their runs may have been cut since, but not dropped."""
        for node, _ in self._walk(key, array("i", tokens).tobytes()):
            node.pins -= 1

    def shrink(self, size: int) -> int:
        """Drop unpinned runs until `size` bytes are free; return the bytes that were dropped, which may be fewer."""
        freed = 0
        while freed < size:
            node = next((one for one in self._ages if not one.pins and not one.children), None)
            if node is None:
                break
            freed += self._drop(node)
        if freed:
            log.info("dropped %s of cached prefixes for %s", show_bytes(freed), show_bytes(size))
        return freed

    def forget(self, adapter: str) -> None:
        """Drop the prefixes of an adapter, since another may get its name. Refused while one is pinned."""
        roots = [root for key, root in self._roots.items() if key.adapter == adapter]
        nodes = [node for root in roots for node in _below(root)]
        if any(node.pins for node in nodes):
            raise InvalidInput(f"adapter {quote_short(adapter)}: a prompt is pinned with it; unpin it first")
        for node in reversed(nodes):
            self._drop(node)

    def runs(self) -> Iterator[tuple[PrefixKey, list[int], Segment]]:
        """Yield every run with all tokens from the beginning of its text, parents before children.

        What windows hold is left out: their texts are not known.
        """
        for key, root in self._roots.items():
            if key.policy is not None:
                continue
            waiting = [(root, b"")]
            while waiting:
                node, before = waiting.pop()
                data = before + node.tokens
                if node.segment is not None:
                    yield key, array("i", data).tolist(), node.segment
                waiting += [(child, data) for child in node.children.values()]

    def _walk(self, key: PrefixKey, data: bytes) -> Iterator[tuple[Node, int]]:
        """Yield the runs along `data`, each with the number of its tokens that match."""
        node, place = self._roots.get(key), 0
        while node is not None and place < len(data):
            node = node.children.get(data[place : place + WIDTH])
            if node is None:
                return
            common = _common(node.tokens, data[place : place + len(node.tokens)])
            yield node, common // WIDTH
            if common < len(node.tokens):
                return
            place += common

    def _cut(self, node: Node, count: int) -> Node:
        """Cut a run in two after `count` tokens; return the first part, which replaces it in its parent."""
        assert node.segment is not None and node.parent is not None
        before = node.segment.bytes
        first, second = node.segment.split(count)
        head = Node(node.parent, node.tokens[: count * WIDTH], first)
        head.pins = node.pins
        node.parent.children[head.tokens[:WIDTH]] = head
        node.parent, node.tokens, node.segment = head, node.tokens[count * WIDTH :], second
        head.children[node.tokens[:WIDTH]] = node
        self._ages[head] = None
        assert first.bytes + second.bytes == before
        return head

    def _extra_bytes(self, tokens: bytes) -> int:
        """Return the bytes of a run's node in the tree."""
        return self._run_bytes + len(tokens) if self._run_bytes else 0

    def _take_after(self, path: Sequence[tuple[Node, int]], size: int, extra: int) -> bool:
        """Take bytes for a run after `path`, without dropping the runs of `path`."""
        for node, _ in path:
            node.pins += 1
        try:
            return self._take(size, extra)
        finally:
            for node, _ in path:
                node.pins -= 1

    def _take(self, size: int, extra: int) -> bool:
        if size and not self.keeps_new:
            return False
        if self.max_bytes is not None:
            if size > self.max_bytes:
                return False
            while (excess := self.bytes + size - self.max_bytes) > 0:
                if not self.shrink(excess):
                    return False
        missing = self._budget.missing(size + extra)
        if (missing and self.shrink(missing) < missing) or not self._budget.take("prefixes", size + extra):
            return False
        self.bytes += size
        self.taken_bytes += size + extra
        return True

    def _give(self, size: int, extra: int) -> None:
        self._budget.give("prefixes", size + extra)
        self.bytes -= size
        self.taken_bytes -= size + extra

    def _drop(self, node: Node) -> int:
        assert node.parent is not None and node.segment is not None
        size, extra = node.segment.bytes, self._extra_bytes(node.tokens)
        del node.parent.children[node.name], self._ages[node]
        self._give(size, extra)
        if node.parent.parent is None and not node.parent.children:
            self._roots = {key: root for key, root in self._roots.items() if root is not node.parent}
        return size + extra

    def _upwards(self, node: Node) -> list[Node]:
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def _touch(self, path: Sequence[Node]) -> None:
        """Mark a path, from the root downwards, as used now."""
        for node in reversed(path):
            self._ages.move_to_end(node)


class Reuse:
    """Access of one request to the prefix cache."""

    def __init__(self, prefixes: Prefixes, key: PrefixKey, policy: KVEvictionPolicy | None = None) -> None:
        """`policy`: the eviction policy of a request whose state can be saved after evictions."""
        self._prefixes, self._key = prefixes, key
        self._window_key = key._replace(policy=policy) if policy is not None and policy.window else None

    def restore(self, state: State, tokens: Sequence[int], max_tokens: int) -> int:
        """Restore the longest cached prefix into an empty state; return its number of tokens.

        At most `max_tokens` of it were cached before the first eviction. One token is always left to be read.
        """
        if self._window_key is not None:
            segment = self._prefixes.match_window(self._window_key, tokens)
            if segment is not None:
                state.restore(segment)
                state.rewind(max(0, state.position - len(tokens) + 1))
                return state.position
        hit = self._prefixes.match(self._key, tokens, max_tokens)
        for segment, count in hit.runs:
            state.restore(segment if count == segment.tokens else segment.head(count))
        return hit.tokens

    def keep(self, state: State, tokens: Sequence[int]) -> None:
        """Cache `tokens`, which are the first ones that the state was fed."""
        try:
            if state.position == state.length:
                self._keep_run(state, tokens)
            elif self._window_key is not None:
                cached = state.length - (state.position - len(tokens))
                self._prefixes.keep_window(self._window_key, tokens, state, cached)
        except Exception as error:
            # The answer continues; only later prompts are slower.
            self._prefixes.failures += 1
            log.warning("a prefix of %d tokens was not cached: %s", len(tokens), type(error).__name__)

    def _keep_run(self, state: State, tokens: Sequence[int]) -> None:
        cached = self._prefixes.num_cached(self._key, tokens)
        if cached == len(tokens):
            return
        size = state.save_bytes(cached, len(tokens))
        if self._prefixes.make_room(self._key, tokens, size):
            self._prefixes.insert(self._key, tokens, state.save(cached, len(tokens)))


def _below(root: Node) -> list[Node]:
    """Return every run under a root, parents before children."""
    nodes = list(root.children.values())
    for node in nodes:
        nodes += node.children.values()
    return nodes


def _common(one: bytes, other: bytes) -> int:
    """Return the length of the common start in bytes of whole tokens, by bisection: comparing blocks is fast."""
    low, high = 0, min(len(one), len(other)) // WIDTH
    if one[: high * WIDTH] == other[: high * WIDTH]:
        return high * WIDTH
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * WIDTH : middle * WIDTH] == other[low * WIDTH : middle * WIDTH]:
            low = middle
        else:
            high = middle - 1
    return low * WIDTH
