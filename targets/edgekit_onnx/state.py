"""One sequence on onnxruntime: a slot of a KV arena, and the hidden states of an early exit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.enginekit.base import StateBase, StateOwner
from edgekit.enginekit.rope_shift import shift_kv
from edgekit_onnx.early_exit_cache import EarlyExitCache
from edgekit_onnx.kv_arena import KEY, VALUE, KVArena
from edgekit_onnx.session_variants import Running
from edgekit_onnx.slot_table import SlotTable


class OnnxState(StateBase):
    """A slot of an arena. Its table moves it to a lower slot when one is freed."""

    def __init__(self, owner: StateOwner, storage: KVCacheConfig, table: SlotTable) -> None:
        super().__init__(owner, storage)
        self.table = table
        self.drafted: EarlyExitCache | None = None  # of tokens that an early exit fed, also after their rewind
        self.slot = table.add(self)

    @property
    def arena(self) -> KVArena:
        return self.table.arena

    @property
    def running(self) -> Running:
        """The sessions that run this state, and their bound inputs."""
        return self.table.running

    def is_before(self, other: OnnxState) -> bool:
        """True where `other` has the next slot of the same arena."""
        return self.table is other.table and self.slot + 1 == other.slot

    def append(self, count: int, *, all_layers: bool) -> None:
        """Count `count` tokens that the engine has fed."""
        if all_layers:
            self.drafted = None
        self.held.append(count, all_layers=all_layers)

    def moved_to(self, slot: int) -> None:
        """Take another slot; the keys and values of its tokens were copied there."""
        self.slot = slot
        self.drafted = None  # keys and values behind the last token were not copied

    def _evict(self, start: int, stop: int) -> None:
        self.drafted = None
        for layer, rotation in enumerate(self.table.rotation.back(stop - start)):
            with self.arena.edit(layer, KEY, self.slot) as keys:
                shift_kv(keys, start, stop, self.length, rotation)
            with self.arena.edit(layer, VALUE, self.slot) as values:
                shift_kv(values, start, stop, self.length, None)
        self.arena.trim(self.slot, self.length - (stop - start))

    def _read(self, start: int, stop: int) -> list[NDArray[Any]]:
        return [
            np.array(self.arena.read(layer, kind, self.slot)[:, start:stop])
            for layer in range(len(self.arena.layers))
            for kind in (KEY, VALUE)
        ]

    def _write(self, arrays: Sequence[NDArray[Any]]) -> None:
        self.drafted = None
        for index, array in enumerate(arrays):
            with self.arena.edit(index // 2, index % 2, self.slot) as cache:
                cache[:, self.length : self.length + array.shape[1]] = array
