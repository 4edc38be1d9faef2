"""The adapters of a runtime: loaded and dropped between two steps, counted by the ledger, chosen by each request.

It knows nothing of what an adapter is: the engine reads it and says what it takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgekit.adapters import check_adapter_name
from edgekit.errors import DoesNotFit, InvalidInput, UnknownName, clip
from edgekit.units import show_bytes

if TYPE_CHECKING:
    from edgekit.cache import Storage
    from edgekit.interfaces import Engine
    from edgekit.runtime.ledger import Ledger
    from edgekit.runtime.loop import Loop
    from edgekit.runtime.prefixes import Prefixes


class Adapters:
    """Which adapters are loaded, and the bytes of each."""

    def __init__(self, engine: Engine, loop: Loop, ledger: Ledger, prefixes: Prefixes | None) -> None:
        self._engine, self._loop, self._ledger, self._prefixes = engine, loop, ledger, prefixes
        self._bytes: dict[str, int] = {}

    @property
    def bytes(self) -> dict[str, int]:
        """A copy, by name."""
        return dict(self._bytes)

    def storage(self, base: Storage, adapter: str | None) -> Storage:
        """How a request with that adapter holds its state."""
        if adapter is None:
            return base
        if adapter not in self._bytes:
            raise UnknownName("adapter", adapter, self._bytes)
        return base.model_copy(update={"adapter": adapter})

    def load(self, name: str, files: Path) -> None:
        """Refused where the memory that was promised to this runtime has no room for it."""
        check_adapter_name(name)
        self._loop.exclusively(lambda: self._load(name, files))

    def drop(self, name: str) -> None:
        """Refused while a request names it, waiting ones included."""
        self._loop.exclusively(lambda: self._drop(name))

    def _load(self, name: str, files: Path) -> None:
        if name in self._bytes:
            raise InvalidInput(f"adapter {clip(name)} is loaded already; drop it first")
        taken = self._engine.load_adapter(name, files)
        missing = self._ledger.missing(taken)
        if missing and self._prefixes is not None:
            self._prefixes.shrink(missing)
        if not self._ledger.take("adapters", taken):
            self._engine.drop_adapter(name)
            free = max(0, self._ledger.free_bytes or 0)
            raise DoesNotFit(
                f"adapter {clip(name)} needs {show_bytes(taken)} and {show_bytes(free)} are free; "
                "drop another adapter, or open with more memory"
            )
        self._bytes[name] = taken

    def _drop(self, name: str) -> None:
        if name not in self._bytes:
            raise UnknownName("adapter", name, self._bytes)
        requests = self._loop.requests_with(name)
        if requests:
            raise InvalidInput(f"adapter {clip(name)} is in use by {requests} requests; cancel them or let them end")
        if self._prefixes is not None:
            self._prefixes.forget(name)
        self._engine.drop_adapter(name)
        self._ledger.give("adapters", self._bytes.pop(name))
