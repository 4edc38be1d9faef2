"""The memory budget that states, prefixes, drafts, adapters and compiled formats share.

Plain arithmetic without a lock: the driver lets one thread at a time use it.
"""

from __future__ import annotations

from typing import Literal, TypeVar

Result = TypeVar("Result")
BudgetClass = Literal["states", "prefixes", "draft", "adapters", "formats", "workers"]


class MemoryBudget:
    """Bytes taken by class, together never more than `allowed_bytes` (None: no limit)."""

    def __init__(self, allowed_bytes: int | None = None) -> None:
        self.allowed_bytes = allowed_bytes
        self._taken: dict[BudgetClass, int] = {}

    @property
    def taken(self) -> dict[BudgetClass, int]:
        """A copy of the bytes by class."""
        return dict(self._taken)

    @property
    def free_bytes(self) -> int | None:
        """Bytes that can still be taken; None: no limit."""
        return None if self.allowed_bytes is None else self.allowed_bytes - sum(self._taken.values())

    def missing(self, size: int) -> int:
        """Return the bytes that must be given back before `size` bytes can be taken."""
        free = self.free_bytes
        return 0 if free is None else max(0, size - free)

    def take(self, name: BudgetClass, size: int) -> bool:
        """Take `size` bytes, or change nothing and return False."""
        if self.missing(size):
            return False
        self._taken[name] = self._taken.get(name, 0) + size
        return True

    def give(self, name: BudgetClass, size: int) -> None:
        """Give back bytes that were taken for that class."""
        rest = self._taken.get(name, 0) - size
        assert rest >= 0, f"{name}: {size} bytes were never taken"
        self._taken[name] = rest
