"""One sequence on onnxruntime: a slot of a KV arena, and the hidden states of an early exit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit.contracts.engine import CachedKV
from edgekit.contracts.kv_policy import Eviction, KVCacheConfig
from edgekit.enginekit.recurrent import Values, in_own_pages
from edgekit.enginekit.rope_shift import runs_between, shift_kv
from edgekit.enginekit.state import StateBase, StateOwner
from edgekit_onnx.early_exit_cache import EarlyExitCache
from edgekit_onnx.kv_arena import KEY, VALUE, KVArena
from edgekit_onnx.session_variants import StateSessions
from edgekit_onnx.slot_table import SlotTable


class OnnxState(StateBase):
    """A state in a slot of an arena. Its table may move it to a lower slot that becomes free."""

    saves_evicted = True

    def __init__(self, owner: StateOwner, storage: KVCacheConfig, table: SlotTable) -> None:
        super().__init__(owner, storage)
        self.table = table
        self.drafted: EarlyExitCache | None = None  # results of an early exit, kept after a rewind
        self.slot = table.add(self)

    @property
    def arena(self) -> KVArena:
        return self.table.arena

    @property
    def running(self) -> StateSessions:
        """The sessions that run this state, and their constant inputs."""
        return self.table.running

    def is_before(self, other: OnnxState) -> bool:
        """Return True if `other` has the next slot of the same arena."""
        return self.table is other.table and self.slot + 1 == other.slot

    def append(self, count: int, *, all_layers: bool) -> None:
        """Count `count` tokens that the engine has fed."""
        if all_layers:
            self.drafted = None
        self.held.append(count, all_layers=all_layers)

    def moved_to(self, slot: int) -> None:
        """Note the new slot, to which keys and values were copied."""
        self.slot = slot
        self.drafted = None  # keys and values after the last token were not copied

    def _evict(self, spans: Sequence[Eviction]) -> None:
        self.drafted = None
        runs = list(runs_between(spans, self.length))
        turns = [self.table.rotation.back(run.start - run.place) for run in runs]
        for layer in range(len(self.arena.layers)):
            with self.arena.edit(layer, KEY, self.slot) as keys, self.arena.edit(layer, VALUE, self.slot) as values:
                for run, turn in zip(runs, turns, strict=True):
                    shift_kv(keys, run.place, run.start, run.stop, turn[layer])
                    shift_kv(values, run.place, run.start, run.stop, None)
        self.arena.trim(self.slot, self.length - sum(stop - start for start, stop in spans))

    def _cached_layers(self, start: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        for layer, shape in enumerate(self.arena.layers):
            if shape.kv_heads:
                keys, values = (self.arena.read(layer, kind, self.slot) for kind in (KEY, VALUE))
                yield keys[:, start : self.length], values[:, start : self.length]

    def _cached(self, layer: int, start: int, stop: int) -> CachedKV:
        arrays = [self.arena.read(layer, kind, self.slot)[:, start:stop] for kind in (KEY, VALUE)]
        if self.arena.dtype == np.float32:
            return CachedKV(*arrays)
        keys, values = (array.astype(np.float32) for array in arrays)
        if self.table.steps is not None:
            of_keys, of_values = self.table.steps[layer]
            keys, values = keys * of_keys[:, None], values * of_values[:, None]
        return CachedKV(keys, values)

    def _attention(self, newest: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        assert self.table.attention is not None, "`capabilities.scorers` has none by attention"
        count = len(newest)
        computed = self._read(self.length - count, self.length)
        self.held.rewind(count)
        try:
            return iter(self.table.attention.read(self.arena, self.slot, self.length, newest))
        finally:
            self._write(computed)
            self.held.append(count, all_layers=True)

    def _read(self, start: int, stop: int) -> list[NDArray[Any]]:
        return [np.array(self.arena.read(layer, kind, self.slot)[:, start:stop]) for layer, kind in self._places()]

    def _write(self, arrays: Sequence[NDArray[Any]]) -> None:
        self.drafted = None
        for (layer, kind), array in zip(self._places(), arrays, strict=True):
            with self.arena.edit(layer, kind, self.slot) as cache:
                cache[:, self.length : self.length + array.shape[1]] = array

    def _places(self) -> list[tuple[int, int]]:
        """Return (layer, kind) for all keys and values."""
        layers = enumerate(self.arena.layers)
        return [(index, kind) for index, layer in layers if layer.kv_heads for kind in (KEY, VALUE)]

    def _read_recurrent(self) -> Values:
        return in_own_pages(tuple(values[self.slot] for values in self.arena.recurrent))

    def _write_recurrent(self, values: Values) -> None:
        for array, kept in zip(self.arena.recurrent, values, strict=True):
            array[self.slot] = kept
