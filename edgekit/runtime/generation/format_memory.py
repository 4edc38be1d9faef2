"""The memory of compiled formats, in use or kept for later answers.

Copies of a matcher share its lexer, which grows while answers are written. A format therefore counts with what it took
when it was compiled and with what it has grown since, as long as it is kept or an answer uses it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from edgekit.common.footprint import private_bytes_now, return_unused

if TYPE_CHECKING:
    from edgekit.runtime.budget_share import BudgetShare

MAX_FORMATS_BYTES = 64 << 20  # of all formats; unused ones are dropped, the least recently used first
MAX_GROWN_BYTES = 16 << 20  # of one format while answers are written: usual ones grow by less than 1 MiB
_RENEWED_BYTES = 4 << 20  # a format that has grown by more is compiled anew for the next answer
_GRAIN_BYTES = 64 << 10  # smaller growth is not taken from the budget yet

FormatKey = tuple[str, str]  # the kind of a format, and its text


class CompiledFormat:
    """A matcher at the start of an answer, and the memory that it and its copies take."""

    def __init__(self, key: FormatKey, matcher: Any, size: int) -> None:
        self.key, self.matcher = key, matcher
        self.bytes = size  # taken from the budget
        self.grown_bytes = 0  # since it was compiled
        self.counted_bytes = 0  # the part of them that is among `bytes`
        self.process_bytes = private_bytes_now()  # of the whole process then
        self.users = WeakSet[Any]()  # the grammars of answers


class FormatMemory:
    """The table of compiled formats. Its methods need sole use of the budget, but for `find`."""

    def __init__(self, share: BudgetShare) -> None:
        self._share = share
        self._kept: OrderedDict[FormatKey, CompiledFormat] = OrderedDict()
        self._dropped: list[CompiledFormat] = []  # in use, and not for later answers
        self._lock = RLock()  # of the table; never held while waiting, but a signal handler may interrupt it

    @property
    def bytes(self) -> int:
        """The memory of all formats, including bytes not yet taken from the budget."""
        with self._lock:
            return sum(each.bytes - each.counted_bytes + each.grown_bytes for each in self._all())

    def find(self, key: FormatKey, use: Callable[[CompiledFormat], Any]) -> Any:
        """Look up a cached format and register the caller as a user by `use`; None if it is not cached."""
        with self._lock:
            compiled = self._kept.get(key)
            if compiled is None:
                return None
            self._kept.move_to_end(key)
            return use(compiled)

    def take(self, size: int) -> bool:
        """Take memory for formats; unused ones give way. Returns False without room."""
        self._settle()
        while self._taken() + size > MAX_FORMATS_BYTES:
            if not self._drop_unused():
                return False
        while not self._share.take(size, "formats"):
            if not self._drop_unused():
                return False
        return True

    def give(self, size: int) -> None:
        self._share.give(size, "formats")

    def lend(self, least: int, most: int) -> int:
        """Take up to `most` bytes for a worker, and return their number. Unused formats give way for `least`."""
        self._settle()
        lent = self._share.take_most(most, "workers")
        while lent < least and self._drop_unused():
            lent += self._share.take_most(most - lent, "workers")
        return lent

    def keep(self, compiled: CompiledFormat, taken: int) -> bool:
        """Keep a format, for which `taken` bytes were taken before it was measured; return False without room."""
        more = compiled.bytes - taken
        if more > 0 and not self.take(more):
            return False
        if more < 0:
            self.give(-more)
        with self._lock:
            self._kept[compiled.key] = compiled
        return True

    def grow(self, compiled: CompiledFormat, size: int) -> bool:
        """Count a format's growth. False without room: the format is dropped from the cache, and the answer must end.

        Holes of the heap that are returned and taken again look like growth, so at most the process's growth counts.
        """
        if size <= 0:
            return True
        most = max(compiled.counted_bytes, private_bytes_now() - compiled.process_bytes)
        compiled.grown_bytes = min(compiled.grown_bytes + size, most)
        more = compiled.grown_bytes - compiled.counted_bytes
        if more < _GRAIN_BYTES:
            return True
        if compiled.grown_bytes > _RENEWED_BYTES:
            self.drop(compiled)
        if compiled.grown_bytes > MAX_GROWN_BYTES or not self.take(more):
            self.drop(compiled)
            return False
        compiled.bytes += more
        compiled.counted_bytes += more
        return True

    def drop(self, compiled: CompiledFormat) -> None:
        """Drop a format, so that the next answer compiles it anew. Its memory counts until its last answer ends."""
        with self._lock:
            if self._kept.get(compiled.key) is compiled:
                del self._kept[compiled.key]
                self._dropped.append(compiled)

    def release(self, compiled: CompiledFormat, user: Any) -> None:
        """Forget a user, whose answer has ended."""
        compiled.users.discard(user)
        if self._dropped:
            self._settle()

    def _taken(self) -> int:
        with self._lock:
            return sum(each.bytes for each in self._all())

    def _all(self) -> tuple[CompiledFormat, ...]:
        return (*self._kept.values(), *self._dropped)

    def _drop_unused(self) -> bool:
        """Drop the least recently used format that no answer uses; return False if there is none."""
        with self._lock:
            unused = next((each for each in self._kept.values() if not each.users), None)
            if unused is not None:
                del self._kept[unused.key]
        if unused is not None:
            self._free([unused])
        return unused is not None

    def _settle(self) -> None:
        """Free dropped formats that no answer uses any more."""
        with self._lock:
            unused = [each for each in self._dropped if not each.users]
            self._dropped = [each for each in self._dropped if each.users]
        if unused:
            self._free(unused)

    def _free(self, formats: Sequence[CompiledFormat]) -> None:
        for each in formats:
            each.matcher = None  # the error of an ended answer may still refer to its format
        return_unused()
        self._share.give(sum(each.bytes for each in formats), "formats")
