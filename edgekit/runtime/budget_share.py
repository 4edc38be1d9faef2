"""The budget for what comes after opening: compiled formats and the workers. Cached prefixes make room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from edgekit.errors import RuntimeClosed

if TYPE_CHECKING:
    from edgekit.runtime.memory.budget import BudgetClass, MemoryBudget
    from edgekit.runtime.prefix_cache.tree import Prefixes

Result = TypeVar("Result")
Exclusively = Callable[[Callable[[], Any]], Any]  # runs work between two steps


class BudgetShare:
    """Takes and returns bytes, and leaves `states_bytes` for states.

    All methods need sole use of the budget: in a step of the scheduler, or in `exclusively`.
    """

    def __init__(
        self, exclusively: Exclusively, budget: MemoryBudget, prefixes: Prefixes | None, states_bytes: int
    ) -> None:
        self._exclusively, self._budget, self._prefixes = exclusively, budget, prefixes
        self._states_bytes = states_bytes

    def exclusively(self, work: Callable[[], Result]) -> Result:
        """Run `work` between two steps. Deadlocks in a step."""
        result: Result = self._exclusively(work)
        return result

    def take(self, size: int, name: BudgetClass) -> bool:
        """Take bytes, or change nothing and return False."""
        return self._room(size) == size and self._budget.take(name, size)

    def take_most(self, size: int, name: BudgetClass) -> int:
        """Take as many of these bytes as are free, and return their number."""
        room = self._room(size)
        self._budget.take(name, room)
        return room

    def give(self, size: int, name: BudgetClass) -> None:
        """Give back bytes that were taken."""
        self._budget.give(name, size)

    @contextmanager
    def lend(self, size: int, name: BudgetClass) -> Iterator[None]:
        """Take as many of these bytes as are free until the block ends. Deadlocks in a step."""
        lent = 0
        with suppress(RuntimeClosed):  # a tokenizer may be used after its runtime
            lent = self.exclusively(lambda: self.take_most(size, name))
        try:
            yield
        finally:
            with suppress(RuntimeClosed):
                self.exclusively(lambda: self.give(lent, name))

    def _room(self, size: int) -> int:
        """Drop prefixes until `size` bytes are free or none is left; return how many of the bytes are free."""
        later = max(0, self._states_bytes - self._budget.taken.get("states", 0))
        missing = self._budget.missing(size + later)
        if missing and self._prefixes is not None:
            self._prefixes.shrink(missing)
        return max(0, size - self._budget.missing(size + later))
