"""The contract of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

LOOKUP_TOKENS = 15  # the most tokens that prompt lookup proposes at once, here and in the native library


class Drafter(Protocol):
    """Proposes tokens."""

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        """Return up to `limit` draft tokens; empty without a guess."""

    def observe(self, accepted: Sequence[int]) -> None:
        """Learn the tokens that were accepted after the last proposal."""

    def close(self) -> None: ...
