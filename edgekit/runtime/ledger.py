"""Who was promised how much memory: states, prefixes, drafts and adapters share what the contract allows.

Plain arithmetic: it neither allocates nor looks at the machine, and it is not locked; the loop asks it under its lock.
"""

from __future__ import annotations

from typing import Literal

Kind = Literal["states", "prefixes", "draft", "adapters"]


class Ledger:
    """Bytes by kind, together never more than `allowed_bytes` (None: nobody set a bound)."""

    def __init__(self, allowed_bytes: int | None = None) -> None:
        self.allowed_bytes = allowed_bytes
        self._taken: dict[Kind, int] = {}

    @property
    def taken(self) -> dict[Kind, int]:
        """A copy, by kind."""
        return dict(self._taken)

    @property
    def free_bytes(self) -> int | None:
        """None where there is no bound."""
        return None if self.allowed_bytes is None else self.allowed_bytes - sum(self._taken.values())

    def missing(self, wanted_bytes: int) -> int:
        """How many bytes must be given back before `wanted_bytes` can be taken."""
        free = self.free_bytes
        return 0 if free is None else max(0, wanted_bytes - free)

    def take(self, kind: Kind, wanted_bytes: int) -> bool:
        """Promise them, or change nothing and say no."""
        if self.missing(wanted_bytes):
            return False
        self._taken[kind] = self._taken.get(kind, 0) + wanted_bytes
        return True

    def give(self, kind: Kind, returned_bytes: int) -> None:
        """Back from where they were taken."""
        left = self._taken.get(kind, 0) - returned_bytes
        assert left >= 0, f"{kind}: {returned_bytes} bytes were never taken"
        self._taken[kind] = left
