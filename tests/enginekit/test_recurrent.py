"""The bookkeeping of a recurrent part: how many copies of it exist at once."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from edgekit.enginekit.recurrent import RecurrentPart, Values

EMPTY = (np.zeros(3),)


class Copies:
    """Copies of a recurrent part, and how many were alive when each was made."""

    def __init__(self) -> None:
        self.alive: list[int] = []
        self._made: list[weakref.ref[np.ndarray]] = []

    def read(self) -> Values:
        gc.collect()
        self.alive.append(sum(made() is not None for made in self._made))
        copy = np.zeros(3)
        self._made.append(weakref.ref(copy))
        return (copy,)


def fed(part: RecurrentPart, position: int, count: int) -> int:
    for piece in part.pieces(position, list(range(count)), 0, 1 << 10):
        part.fed(piece)
    return position + count


def test_an_eviction_drops_checkpoints_before_it_copies() -> None:
    copies = Copies()
    part = RecurrentPart(16, 4, EMPTY, copies.read, lambda values: None)
    position = fed(part, 0, 40)
    assert copies.alive == [0, 1]
    part.evict(position)
    assert copies.alive[-1] == 0


def test_the_end_of_a_long_replay_takes_the_place_of_the_last_one() -> None:
    copies = Copies()
    part = RecurrentPart(64, 2, EMPTY, copies.read, lambda values: None)
    position = fed(part, 0, 100)
    for back, more in ((5, 30), (8, 8)):
        part.rewind(position - back)
        position = fed(part, position - back, more)
    assert copies.alive == [0, 1, 1]


def test_no_more_checkpoints_are_kept_than_are_counted() -> None:
    copies = Copies()
    part = RecurrentPart(64, 1, EMPTY, copies.read, lambda values: None)
    position = fed(part, 0, 40)
    part.evict(position)
    position = fed(part, position, 60)  # past an edge
    part.rewind(position - 5)
    position = fed(part, position - 5, 30)  # a long replay
    assert copies.alive == [0]
    part.rewind(40)
    assert part.position == 40


def test_an_edge_takes_the_place_of_a_replay_s_end() -> None:
    copies = Copies()
    part = RecurrentPart(64, 2, EMPTY, copies.read, lambda values: None)
    position = fed(part, 0, 50)
    part.rewind(position - 5)
    position = fed(part, position - 5, 30)
    assert sorted(part.checkpoints(0, 70)) == [45, 64]
    fed(part, position, 60)
    assert sorted(part.checkpoints(0, 130)) == [64, 128]
    assert max(copies.alive) <= 2


def test_the_beginning_of_a_text_is_written_as_zeros() -> None:
    copies, written = Copies(), list[Values]()
    part = RecurrentPart(64, 2, EMPTY, copies.read, written.append)
    part.rewind(fed(part, 0, 50) - 50)
    assert part.position == 0 and not written[0][0].any()
