"""The memory of compiled formats and their worker: threads that compile take it, and cached prefixes make room."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgekit.runtime.driver import Driver
    from edgekit.runtime.memory.budget import BudgetClass, MemoryBudget
    from edgekit.runtime.prefix_cache.tree import Prefixes


class BudgetShare:
    """Takes and returns bytes between two steps of the scheduler. Leaves `states_bytes` for states."""

    def __init__(self, driver: Driver, budget: MemoryBudget, prefixes: Prefixes | None, states_bytes: int) -> None:
        self._driver, self._budget, self._prefixes = driver, budget, prefixes
        self._states_bytes = states_bytes

    def take(self, size: int, name: BudgetClass) -> bool:
        """Take bytes, or change nothing and return False."""
        return self._driver.exclusively(lambda: self._taken(size, name))

    def take_most(self, size: int, name: BudgetClass) -> None:
        """Take as many of these bytes as are free."""
        self._driver.exclusively(lambda: self._budget.take(name, self._room(size)))

    def give(self, size: int) -> None:
        """Give back bytes that were taken for formats."""
        self._driver.exclusively(lambda: self._budget.give("formats", size))

    def _taken(self, size: int, name: BudgetClass) -> bool:
        return self._room(size) == size and self._budget.take(name, size)

    def _room(self, size: int) -> int:
        """Drop prefixes until `size` bytes are free, or none is left; return how many of them are free."""
        later = max(0, self._states_bytes - self._budget.taken.get("states", 0))
        missing = self._budget.missing(size + later)
        if missing and self._prefixes is not None:
            self._prefixes.shrink(missing)
        return max(0, size - self._budget.missing(size + later))
