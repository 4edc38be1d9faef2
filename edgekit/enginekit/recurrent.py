"""The recurrent part of one state: its checkpoints, and the tokens that lead from one to the next.

The part itself lies in the engine's memory, and no arithmetic takes a token out of it again. A rewind therefore loads
the nearest checkpoint, and the next call computes the tokens since then again, together with its own. A call that
verifies drafts leaves the part where the certain tokens end, so that after it nothing needs to be taken out.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from edgekit.contracts.engine import Chunk
from edgekit.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.contracts.engine import Logits

Values: TypeAlias = "tuple[NDArray[Any], ...]"  # one array for each recurrent layer

# Calls with more rows of logits score text and are not rewound; longer replays run on their own, to be kept.
MOST_UNCERTAIN = 16


class ReplayPiece(NamedTuple):
    """Tokens of one engine call for a state: the first `kept` of them enter the recurrent part."""

    tokens: Sequence[int]
    num_logits: int
    kept: int
    is_replay: bool  # of a text that may be rewound to again


class RecurrentPart:
    """The bookkeeping of one state's recurrent part. `read` copies it from the engine's memory, `write` replaces it."""

    def __init__(self, spacing: int, read: Callable[[], Values], write: Callable[[Values], None]) -> None:
        self._spacing, self._read, self._write = spacing, read, write
        self.position = 0  # tokens that the part in the engine's memory includes
        self.kept = 0  # tokens of the present call that it is to include
        self._start = 0  # tokens before the last eviction, to which nothing leads back
        self._tokens = array("i")  # from `_start` on
        self._checkpoints: dict[int, Values] = {0: read()}
        self._latest: int | None = None  # the one checkpoint that lies at no block edge

    @property
    def bytes(self) -> int:
        """The bytes of one checkpoint."""
        return sum(array.nbytes for array in self._checkpoints[max(self._checkpoints)])

    def pieces(self, position: int, tokens: Sequence[int], num_logits: int, most: int) -> Iterator[ReplayPiece]:
        """Yield the calls that feed `tokens` to a state at `position`: with the tokens to replay, cut at block edges.

        `most` is the upper bound on the tokens of a call. `fed` is to be called after each.
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
        """Count a call; keep a checkpoint where the part stands at a block edge, or at the end of a long replay."""
        self.position += piece.kept
        if piece.kept and self.position % self._spacing == 0:
            self._checkpoints[self.position] = self._read()
        elif piece.is_replay:
            self._keep_latest(self.position, self._read())

    def rewind(self, position: int) -> None:
        """Go back to `position`, or to the nearest checkpoint before it. Refused past an eviction."""
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
        """Drop what leads back before `position`, at which tokens are evicted; the part includes all tokens."""
        assert self.position == position
        self._start, self._tokens, self._latest = position, array("i"), None
        self._checkpoints = {position: self._read()}

    def tokens(self, start: int, stop: int) -> array[int]:
        """The tokens of these positions."""
        return self._tokens[start - self._start : stop - self._start]

    def checkpoints(self, start: int, stop: int) -> dict[int, Values]:
        """The checkpoints after `start`, up to `stop`, by position; also one of the part itself if it is at `stop`."""
        found = {at: values for at, values in sorted(self._checkpoints.items()) if start < at <= stop}
        if start < stop == self.position and stop not in found:
            found[stop] = self._read()
        return found

    def num_checkpoints(self, start: int, stop: int) -> int:
        """The number that `checkpoints` would return."""
        found = sum(start < at <= stop for at in self._checkpoints)
        return found + (start < stop == self.position and stop not in self._checkpoints)

    def restore(self, tokens: Sequence[int], checkpoints: Mapping[int, Values]) -> None:
        """Append restored tokens, and go on from the last of their checkpoints."""
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
        self.position = max(self._checkpoints)
        self._write(self._checkpoints[self.position])

    def _keep_latest(self, position: int, values: Values) -> None:
        if self._latest is not None and self._latest != self._start:
            self._checkpoints.pop(self._latest, None)
        self._latest = position
        self._checkpoints.setdefault(position, values)


class RecurrentState(Protocol):
    """A state with a recurrent part, as `forward_in_pieces` sees it."""

    @property
    def position(self) -> int: ...
    @property
    def recurrent(self) -> RecurrentPart | None: ...
    def step_back(self, count: int) -> None:
        """Count the last `count` tokens as not fed; their keys and values are written again."""


def forward_in_pieces(
    states: Sequence[RecurrentState],
    chunks: Sequence[Chunk],
    most: int,
    forward: Callable[[list[int], list[Chunk]], Sequence[Logits]],
) -> list[Logits]:
    """Feed chunks with what their states replay, cut where checkpoints lie; return the logits of each chunk.

    `forward` makes one call for the next piece of each state, given by its index. It feeds a state that stands where
    its recurrent part does, and keeps the part after `recurrent.kept` tokens.
    """
    parts = [state.recurrent for state in states if state.recurrent is not None]
    assert len(parts) == len(states)
    waiting = []
    for state, part, chunk in zip(states, parts, chunks, strict=True):
        waiting.append(part.pieces(state.position, chunk.tokens, chunk.num_logits, most))
        state.step_back(state.position - part.position)
    rows: list[list[Logits]] = [[] for _ in chunks]
    while pieces := [(index, piece) for index, each in enumerate(waiting) for piece in islice(each, 1)]:
        for index, piece in pieces:
            parts[index].kept = piece.kept
        calls = [chunks[index]._replace(tokens=piece.tokens, num_logits=piece.num_logits) for index, piece in pieces]
        for (index, piece), found in zip(pieces, forward([index for index, _ in pieces], calls), strict=True):
            parts[index].fed(piece)
            rows[index].append(found)
    filled = [[part for part in each if len(part)] or each[:1] for each in rows if each]
    return [np.concatenate(each) if len(each) > 1 else each[0] for each in filled]
