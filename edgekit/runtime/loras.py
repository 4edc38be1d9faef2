"""The LoRA adapters of a runtime: loaded and dropped between two steps, and counted in the memory budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgekit.common.units import show_bytes
from edgekit.errors import DoesNotFit, InvalidInput, UnknownName, quote_short
from edgekit.model.lora import WEIGHTS, check_adapter_name

if TYPE_CHECKING:
    from edgekit.contracts.engine import Engine
    from edgekit.contracts.kv_policy import KVCacheConfig
    from edgekit.runtime.driver import Driver
    from edgekit.runtime.memory.budget import MemoryBudget
    from edgekit.runtime.prefix_cache.tree import Prefixes


class LoraRegistry:
    """The loaded adapters, and the bytes of each in the memory budget."""

    def __init__(self, engine: Engine, driver: Driver, budget: MemoryBudget, prefixes: Prefixes | None) -> None:
        self._engine, self._driver, self._budget, self._prefixes = engine, driver, budget, prefixes
        self._bytes: dict[str, int] = {}

    @property
    def bytes(self) -> dict[str, int]:
        """A copy of the bytes of every adapter, keyed by name."""
        return dict(self._bytes)

    def kv_config(self, base: KVCacheConfig, adapter: str | None) -> KVCacheConfig:
        """Return `base` for a request with `adapter`."""
        if adapter is None:
            return base
        if adapter not in self._bytes:
            raise UnknownName("adapter", adapter, self._bytes)
        return base.model_copy(update={"adapter": adapter})

    def load(self, name: str, folder: Path) -> None:
        """Load the adapter in a PEFT folder. Raises `DoesNotFit` if the budget has no room for it."""
        check_adapter_name(name)
        self._driver.exclusively(lambda: self._load(name, folder))

    def drop(self, name: str) -> None:
        """Unload an adapter; refused while a running or waiting request uses it."""
        self._driver.exclusively(lambda: self._drop(name))

    def _load(self, name: str, folder: Path) -> None:
        if name in self._bytes:
            raise InvalidInput(f"adapter {quote_short(name)} is loaded already; drop it first")
        self._check_room(name, _least_bytes(folder))
        size = self._engine.load_adapter(name, folder)
        try:
            self._check_room(name, size)
        except DoesNotFit:
            self._engine.drop_adapter(name)
            raise
        self._budget.take("adapters", size)
        self._bytes[name] = size

    def _check_room(self, name: str, size: int) -> None:
        """Drop prefixes until `size` bytes are free. Raises `DoesNotFit` where they cannot be."""
        missing = self._budget.missing(size)
        if missing and self._prefixes is not None:
            self._prefixes.shrink(missing)
        if self._budget.missing(size):
            free = max(0, self._budget.free_bytes or 0)
            raise DoesNotFit(
                f"adapter {quote_short(name)} needs {show_bytes(size)} and {show_bytes(free)} are free; "
                "drop another adapter, or open with more memory"
            )

    def _drop(self, name: str) -> None:
        if name not in self._bytes:
            raise UnknownName("adapter", name, self._bytes)
        requests = self._driver.num_requests_with(name)
        if requests:
            raise InvalidInput(
                f"adapter {quote_short(name)} is in use by {requests} requests; cancel them or let them end"
            )
        if self._prefixes is not None:
            self._prefixes.forget(name)
        self._engine.drop_adapter(name)
        self._budget.give("adapters", self._bytes.pop(name))


def _least_bytes(folder: Path) -> int:
    """Return the least bytes that an adapter takes: a file of 32 bits may be kept in 16."""
    file = folder / WEIGHTS
    return file.stat().st_size // 2 if file.is_file() else 0
