"""What a forward of so many tokens costs on this machine: measured once for an artifact, then kept as a machine fact.

Only ratios count: how fast the machine is at this moment is learned from the steps themselves.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from edgekit.errors import Unsupported
from edgekit.facts import read_fact, write_fact
from edgekit.interfaces import Chunk
from edgekit.memory import LONE_VERIFIED_ROWS

if TYPE_CHECKING:
    from edgekit.cache import Storage
    from edgekit.interfaces import Engine

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, LONE_VERIFIED_ROWS)
_PAST_TOKENS = 32
_FEWEST_ROUNDS, _MOST_ROUNDS = 4, 60
_USUAL_S, _LONGEST_S = 0.4, 2.0  # of one calibration; a slow engine gets fewer rounds, at least two


class Costs:
    """Seconds of a forward, by its tokens."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        assert 1 in seconds, seconds
        self._rows = sorted(seconds)
        # More tokens never cost less: where it was measured so, that was noise.
        self._seconds: list[float] = []
        for rows in self._rows:
            self._seconds.append(max(seconds[rows], self._seconds[-1] if self._seconds else 0.0))
        self.one = self._seconds[0]

    def of(self, rows: int) -> float:
        """Between two measured sizes, on the line through them; above the largest, on the line from the first."""
        place = bisect_left(self._rows, rows)
        if place < len(self._rows) and self._rows[place] == rows:
            return self._seconds[place]
        left, right = (place - 1, place) if place < len(self._rows) else (0, len(self._rows) - 1)
        if left == right:
            return self.one * rows
        slope = (self._seconds[right] - self._seconds[left]) / (self._rows[right] - self._rows[left])
        return self._seconds[right] + slope * (rows - self._rows[right])

    @property
    def most(self) -> int:
        """The most tokens that were measured."""
        return self._rows[-1]

    def scaled(self, one: float) -> Costs:
        """The same shape where one token takes `one` seconds."""
        return Costs({rows: seconds * one / self.one for rows, seconds in zip(self._rows, self._seconds, strict=True)})

    def ratios(self) -> dict[int, float]:
        """As multiples of one token's."""
        return {rows: seconds / self.one for rows, seconds in zip(self._rows, self._seconds, strict=True)}


def known_costs(engine: Engine, storage: Storage, artifact_sha256: str | None, *, exact: bool = False) -> Costs:
    """What was measured before for this artifact on this machine, or measured now and kept."""
    name = f"forward-cost{'-exact' if exact else ''}"
    found = _understood(read_fact(artifact_sha256, name)) if artifact_sha256 else None
    if found is None:
        probe = Probe(engine, storage)
        try:
            found = by_turns({rows: partial(probe.seconds, rows) for rows in probe.sizes})
        finally:
            probe.close()
        if artifact_sha256:
            write_fact(artifact_sha256, name, {"seconds": {str(rows): seconds for rows, seconds in found.items()}})
    return Costs(found)


def known_share(name: str, artifact_sha256: str, target: Probe, draft: Probe) -> float:
    """What one token costs the draft, as a share of what it costs the target; measured by turns, or known before."""
    kept = read_fact(artifact_sha256, name)
    share = kept.get("share") if kept else None
    if not (isinstance(share, float) and 0 < share < math.inf):
        found = by_turns({0: lambda: target.seconds(1), 1: lambda: draft.seconds(1)})
        share = found[1] / found[0]
        write_fact(artifact_sha256, name, {"share": share})
    return share


def by_turns(tries: Mapping[int, Callable[[], float]]) -> dict[int, float]:
    """The least seconds of each, over rounds in which each has its turn: what disturbs one disturbs the others."""
    for each in tries.values():
        each()  # makes bindings and buffers
    seconds = dict.fromkeys(tries, math.inf)
    began = perf_counter()
    for turn in range(_MOST_ROUNDS):
        for name, each in tries.items():
            seconds[name] = min(seconds[name], each())
        taken = perf_counter() - began
        if taken > _LONGEST_S or (taken > _USUAL_S and turn + 1 >= _FEWEST_ROUNDS):
            break
    return seconds


class Probe:
    """A state of an engine on which forwards are timed and taken back."""

    def __init__(self, engine: Engine, storage: Storage) -> None:
        able = engine.abilities
        past = min(_PAST_TOKENS, storage.capacity_tokens // 2)
        room = min(storage.capacity_tokens - past, able.max_chunk_tokens)
        if able.max_rewind is not None:
            room = min(room, able.max_rewind)
        if room < 2:
            raise Unsupported(f"draft: this engine can take back {room} tokens of a step; drafting needs two or more")
        self.sizes = [rows for rows in ROWS if rows <= room]
        self._engine = engine
        self._exit: int | None = None
        self._tokens = [(7 + place * 2_654_435_761) % able.vocabulary for place in range(max(past, room))]
        self._state = engine.start(storage)
        for start in range(0, past, able.max_chunk_tokens):
            stop = min(past, start + able.max_chunk_tokens)
            engine.forward([Chunk(self._state, self._tokens[start:stop], 0)])

    def at_exit(self, layer: int) -> Probe:
        """The same, on the same state, leaving after that layer."""
        other = copy(self)
        other._exit = layer
        return other

    def seconds(self, rows: int) -> float:
        """Of one forward of so many tokens, whose rows are all asked for."""
        began = perf_counter()
        self._engine.forward([Chunk(self._state, self._tokens[:rows], rows, self._exit)])
        taken = perf_counter() - began
        self._state.rewind(rows)
        return taken

    def close(self) -> None:
        self._state.close()


def _understood(kept: Mapping[str, object] | None) -> dict[int, float] | None:
    listed = kept.get("seconds") if kept else None
    if not isinstance(listed, dict):
        return None
    found = {int(rows): each for rows, each in listed.items() if str(rows).isdecimal() and isinstance(each, float)}
    fine = found and 1 in found and all(rows > 0 and 0 < each < math.inf for rows, each in found.items())
    return found if fine and len(found) == len(listed) else None
