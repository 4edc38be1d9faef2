"""The recurrent part of one state: its checkpoints, and the tokens between them.

The part itself is in the engine's memory, and tokens cannot be removed from it. A rewind therefore loads the nearest
earlier checkpoint, and the next call recomputes the tokens since then (the replay) together with its own. A call that
verifies drafts stops the part at the last certain token, so that rejected drafts never enter it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from mmap import mmap
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from edgekit.contracts.engine import Chunk
from edgekit.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.contracts.engine import Logits

Values: TypeAlias = "tuple[NDArray[Any], ...]"  # one array for each recurrent layer

# Calls with more logit rows score text and are not rewound. Longer replays run in a call of their own, so that their
# end can be kept as a checkpoint.
MOST_UNCERTAIN = 16


def in_own_pages(values: Values) -> Values:
    """Copy arrays into one mapping. Its memory goes back to the OS with the copies, while memory of a heap may stay."""
    sizes = [each.nbytes for each in values]
    pages, starts = mmap(-1, sum(sizes)), accumulate([0, *sizes])
    copies = [
        np.frombuffer(pages, each.dtype, each.size, start).reshape(each.shape)
        for each, start in zip(values, starts, strict=False)
    ]
    for copy, each in zip(copies, values, strict=True):
        np.copyto(copy, each)
    return tuple(copies)


def empty_part(shapes: Sequence[tuple[int, ...]]) -> Values:
    """Return the part before the first token: zeros that take no memory."""
    return tuple(np.broadcast_to(np.float32(0), shape) for shape in shapes)


class ReplayPiece(NamedTuple):
    """Tokens of one engine call for a state: the first `kept` of them enter the recurrent part."""

    tokens: Sequence[int]
    num_logits: int
    kept: int
    is_replay: bool  # ends a long replay, at a position that may be rewound to again


class RecurrentPart:
    """The bookkeeping of a state's recurrent part. `read` copies it from the engine's memory, `write` replaces it.

    At most `most` checkpoints are kept. `empty` is the part before the first token, so no copy is kept for position 0.
    """

    def __init__(
        self, spacing: int, most: int, empty: Values, read: Callable[[], Values], write: Callable[[Values], None]
    ) -> None:
        self._spacing, self._most, self._empty, self._read, self._write = spacing, most, empty, read, write
        self.position = 0  # tokens included in the engine's part
        self.kept = 0  # tokens of the current call to include
        self._start = 0  # position of the last eviction, the earliest that a rewind can reach
        self._tokens = array("i")  # from `_start` on
        self._checkpoints: dict[int, Values] = {}
        self._latest: int | None = None  # position of the only checkpoint after `_start` that is not at a block edge

    @property
    def bytes(self) -> int:
        """The size of one checkpoint."""
        return sum(array.nbytes for array in self._empty)

    def pieces(self, position: int, tokens: Sequence[int], num_logits: int, most: int) -> Iterator[ReplayPiece]:
        """Yield the calls that feed `tokens` to a state at `position`: replayed tokens first, cut at block edges.

        `most` limits the tokens of a call. Call `fed` after each piece.
        """
        self._tokens.extend(tokens)
        at, end = self.position, position + len(tokens)
        certain = end - num_logits + 1 if 1 < num_logits <= MOST_UNCERTAIN else end
        while at < end:
            edge, stop = at - at % self._spacing + self._spacing, end
            if end - at > most or edge < certain:
                stop = min(at + most, edge, certain)
            is_replay = position - at > MOST_UNCERTAIN
            if is_replay:
                stop = min(stop, position)
            rows = max(0, stop - max(at, end - num_logits))
            yield ReplayPiece(
                self.tokens(at, stop).tolist(), rows, min(stop, certain) - at, is_replay and stop == position
            )
            at = stop

    def fed(self, piece: ReplayPiece) -> None:
        """Count a call; save a checkpoint at a block edge and at the end of a long replay."""
        self.position += piece.kept
        is_edge = piece.kept and self.position % self._spacing == 0
        if not is_edge and not piece.is_replay:
            return
        if piece.is_replay or len(self._checkpoints) == self._most:
            self._drop_latest()
        if len(self._checkpoints) == self._most:
            return  # a window shorter than a block keeps only the part at its latest eviction
        if is_edge:
            self._checkpoints[self.position] = self._read()
        else:
            self._keep_latest(self.position, self._read())

    def rewind(self, position: int) -> None:
        """Load the nearest checkpoint at or before `position`. Raises `InvalidInput` past an eviction."""
        if position < self._start:
            raise InvalidInput(
                f"cannot rewind to position {position}: tokens were evicted at {self._start}, and the recurrent part "
                "includes them"
            )
        del self._tokens[position - self._start :]
        self._checkpoints = {at: values for at, values in self._checkpoints.items() if at <= position}
        if self.position > position:
            self._load()

    def evict(self, position: int) -> None:
        """Forget all earlier checkpoints and tokens, because tokens are evicted at `position`."""
        assert self.position == position
        self._start, self._tokens, self._latest = position, array("i"), None
        self._checkpoints.clear()  # before a copy is made, which takes as much
        self._checkpoints[position] = self._read()

    def tokens(self, start: int, stop: int) -> array[int]:
        """Return the tokens at these positions."""
        return self._tokens[start - self._start : stop - self._start]

    def checkpoints(self, start: int, stop: int) -> dict[int, Values]:
        """Return the checkpoints in (`start`, `stop`] by position, and the part itself if it is at `stop`."""
        found = {at: values for at, values in sorted(self._checkpoints.items()) if start < at <= stop}
        if start < stop == self.position and stop not in found:
            found[stop] = self._read()
        return found

    def num_checkpoints(self, start: int, stop: int) -> int:
        """Return the number of checkpoints that `checkpoints` would return."""
        found = sum(start < at <= stop for at in self._checkpoints)
        return found + (start < stop == self.position and stop not in self._checkpoints)

    def restore(self, tokens: Sequence[int], checkpoints: Mapping[int, Values]) -> None:
        """Append restored tokens and load their last checkpoint."""
        self._tokens.extend(tokens)
        for at in sorted(checkpoints):
            if at % self._spacing == 0:
                self._checkpoints[at] = checkpoints[at]
        if checkpoints:
            last = max(checkpoints)
            if last % self._spacing:
                self._keep_latest(last, checkpoints[last])
            self._load()

    def _load(self) -> None:
        self.position = max(self._checkpoints, default=0)
        self._write(self._checkpoints.get(self.position, self._empty))

    def _drop_latest(self) -> None:
        if self._latest is not None and self._latest != self._start:
            self._checkpoints.pop(self._latest, None)
        self._latest = None

    def _keep_latest(self, position: int, values: Values) -> None:
        self._drop_latest()
        self._latest = position
        self._checkpoints.setdefault(position, values)


class RecurrentState(Protocol):
    """The part of a state that `forward_in_pieces` uses."""

    @property
    def position(self) -> int: ...
    @property
    def recurrent(self) -> RecurrentPart | None: ...
    def step_back(self, count: int) -> None:
        """Uncount the last `count` tokens; their keys and values are written again."""


def forward_in_pieces(
    states: Sequence[RecurrentState],
    chunks: Sequence[Chunk],
    most: int,
    forward: Callable[[list[int], list[Chunk]], Sequence[Logits]],
) -> list[Logits]:
    """Feed chunks and the replays of their states, cut at checkpoints; return the logits of each chunk.

    `forward` makes one engine call with the next piece of each state, identified by index. When it is called, a state
    is at the position of its recurrent part; it must stop the part after `recurrent.kept` tokens.
    """
    parts = [state.recurrent for state in states if state.recurrent is not None]
    assert len(parts) == len(states)
    waiting = []
    # The index in its chunk of each state's next token; negative for a token that is replayed.
    first = [part.position - state.position for state, part in zip(states, parts, strict=True)]
    for state, part, chunk in zip(states, parts, chunks, strict=True):
        waiting.append(part.pieces(state.position, chunk.tokens, chunk.num_logits, most))
        state.step_back(state.position - part.position)
    rows: list[list[Logits]] = [[] for _ in chunks]
    while pieces := [(index, piece) for index, each in enumerate(waiting) for piece in islice(each, 1)]:
        for index, piece in pieces:
            parts[index].kept = piece.kept
        calls = [_call(chunks[index], piece, first[index]) for index, piece in pieces]
        answers = forward([index for index, _ in pieces], calls)
        for (index, piece), call, found in zip(pieces, calls, answers, strict=True):
            _keep_features(chunks[index], call, first[index])
            first[index] += len(piece.tokens)
            parts[index].fed(piece)
            rows[index].append(found)
    filled = [[part for part in each if len(part)] or each[:1] for each in rows if each]
    return [np.concatenate(each) if len(each) > 1 else each[0] for each in filled]


def _call(chunk: Chunk, piece: ReplayPiece, first: int) -> Chunk:
    """Make the engine call for a piece that begins at the chunk's token `first`, which is negative for a replay."""
    features = chunk.features
    if features is not None and first < 0:
        features = np.empty((len(piece.tokens), features.shape[1]), features.dtype)
    elif features is not None:
        features = features[first : first + len(piece.tokens)]
    return chunk._replace(tokens=piece.tokens, num_logits=piece.num_logits, features=features)


def _keep_features(chunk: Chunk, call: Chunk, first: int) -> None:
    """Copy the features of the chunk's tokens out of a call that replayed others; plain calls wrote them in place."""
    if chunk.features is not None and call.features is not None and first < 0:
        own = call.features[-first:]
        chunk.features[: len(own)] = own
