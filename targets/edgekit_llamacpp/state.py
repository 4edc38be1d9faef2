"""One sequence on llama.cpp. Rewinds and restores are done lazily, at the next call that needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit.contracts.kv_policy import Eviction, KVCacheConfig
from edgekit.enginekit.state import StateBase, StateOwner
from edgekit.errors import Unsupported
from edgekit_llamacpp.context import Context
from edgekit_llamacpp.kv_blob import KVLayout, decode, encode


class LlamaCppState(StateBase):
    """A sequence of a context."""

    def __init__(self, owner: StateOwner, storage: KVCacheConfig, context: Context, layout: KVLayout) -> None:
        super().__init__(owner, storage)
        self.context, self.sequence, self._layout = context, context.take(), layout
        self._stored = 0  # tokens in llama.cpp's cache, including rewound and padding ones
        self._restored: list[Sequence[NDArray[Any]]] = []  # segments to write into the cache

    def settle(self) -> None:
        """Make llama.cpp's cache hold exactly the tokens of this state."""
        if self._restored:
            self._write_restored()
        if self._stored > self.length:
            self.context.remove(self.sequence, self.length)
            self._stored = self.length

    def fed(self, count: int, spare: int) -> None:
        """Count the tokens that a call appended, and `spare` padding tokens, which are dropped before the next call."""
        self.held.append(count, all_layers=True)
        self._stored = self.length + spare

    def evict_spans(self, spans: Sequence[Eviction]) -> None:
        if not (self._owner.capabilities.can_evict and self.context.can_shift):
            raise Unsupported("llamacpp: tokens of this model cannot be evicted; plan without a window")
        super().evict_spans(spans)

    def save(self, start: int, stop: int) -> Any:
        if not self._owner.capabilities.can_save:
            raise Unsupported("llamacpp: keys and values of a model with windows cannot be saved")
        return super().save(start, stop)

    def rewind(self, count: int) -> None:
        if self._restored:
            self.settle()
        super().rewind(count)

    def _evict(self, spans: Sequence[Eviction]) -> None:
        self.settle()
        for start, stop in reversed(spans):
            if stop < self._stored:
                self.context.close_gap(self.sequence, start, stop)
            else:
                self.context.remove(self.sequence, start)
            self._stored -= stop - start

    def _read(self, start: int, stop: int) -> list[NDArray[Any]]:
        self.settle()
        arrays = decode(self.context.read(self.sequence), self._layout, self._stored)
        return [np.ascontiguousarray(array[:, start:stop]) for array in arrays]

    def _write(self, arrays: Sequence[NDArray[Any]]) -> None:
        if not self._owner.capabilities.can_save:
            raise Unsupported("llamacpp: keys and values of a model with windows cannot be restored")
        if self._stored > self.length:
            self.settle()
        self._restored.append(arrays)

    def _write_restored(self) -> None:
        """Write the cached tokens and all restored segments at once: llama.cpp only replaces whole sequences."""
        before = self.context.read(self.sequence) if self._stored else self.context.read_any(self.sequence)
        runs = [decode(before, self._layout, self._stored), *self._restored] if self._stored else self._restored
        joined = [np.concatenate(layer, axis=1) for layer in zip(*runs, strict=True)]
        tokens = int(joined[0].shape[1])
        self.context.write(self.sequence, encode(before, self._layout, joined, tokens))
        self._stored, self._restored = tokens, []
