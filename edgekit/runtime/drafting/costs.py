"""What a forward of so many tokens costs on this machine: measured once for an artifact, then kept as a machine fact.

Only ratios count: how fast the machine is at this moment is learned from the steps themselves.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING

from edgekit.errors import Unsupported
from edgekit.facts import read_fact, write_fact
from edgekit.interfaces import Chunk

if TYPE_CHECKING:
    from edgekit.cache import Storage
    from edgekit.interfaces import Engine

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
_PAST_TOKENS = 32
_ROUNDS = 7
_LIMIT_S = 2.0  # of one calibration; a slow engine gets fewer rounds, at least one


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

    def ratios(self) -> dict[int, float]:
        """As multiples of one token's."""
        return {rows: seconds / self.one for rows, seconds in zip(self._rows, self._seconds, strict=True)}


def known_costs(
    engine: Engine, storage: Storage, artifact_sha256: str | None, *, exact: bool = False, exit_layer: int | None = None
) -> Costs:
    """What was measured before for this artifact on this machine, or measured now and kept."""
    name = f"forward-cost{'-exact' if exact else ''}{f'-exit-{exit_layer}' if exit_layer else ''}"
    kept = read_fact(artifact_sha256, name) if artifact_sha256 else None
    found = _understood(kept)
    if found is None:
        found = measure(engine, storage, exit_layer=exit_layer)
        if artifact_sha256:
            write_fact(artifact_sha256, name, {"seconds": {str(rows): seconds for rows, seconds in found.items()}})
    return Costs(found)


def measure(engine: Engine, storage: Storage, *, exit_layer: int | None = None) -> dict[int, float]:
    """The least time of a few rounds for each size; between them nothing is left in the engine."""
    able = engine.abilities
    past = min(_PAST_TOKENS, storage.capacity_tokens // 2)
    room = min(storage.capacity_tokens - past, able.max_chunk_tokens)
    if able.max_rewind is not None:
        room = min(room, able.max_rewind)
    if room < 2:
        raise Unsupported(f"draft: this engine can take back {room} tokens of a step; drafting needs two or more")
    sizes = [rows for rows in ROWS if rows <= room] if exit_layer is None else [1]
    tokens = [(7 + place * 2_654_435_761) % able.vocabulary for place in range(max(past, max(sizes)))]
    seconds = dict.fromkeys(sizes, math.inf)
    state = engine.start(storage)
    try:
        for start in range(0, past, able.max_chunk_tokens):
            engine.forward([Chunk(state, tokens[start : min(past, start + able.max_chunk_tokens)], 0)])
        began = perf_counter()
        for turn in range(_ROUNDS + 1):
            for rows in sizes:
                started = perf_counter()
                engine.forward([Chunk(state, tokens[:rows], rows, exit_layer)])
                taken = perf_counter() - started
                state.rewind(rows)
                # The first round makes bindings and buffers; it counts only where there is time for no other.
                if turn != 1:
                    seconds[rows] = min(seconds[rows], taken)
                else:
                    seconds[rows] = taken
            if turn and perf_counter() - began > _LIMIT_S:
                break
    finally:
        state.close()
    return seconds


def _understood(kept: Mapping[str, object] | None) -> dict[int, float] | None:
    listed = kept.get("seconds") if kept else None
    if not isinstance(listed, dict):
        return None
    found = {int(rows): each for rows, each in listed.items() if str(rows).isdecimal() and isinstance(each, float)}
    fine = found and 1 in found and all(rows > 0 and 0 < each < math.inf for rows, each in found.items())
    return found if fine and len(found) == len(listed) else None
