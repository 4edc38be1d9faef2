"""One sequence: how many tokens its caches hold, how far their positions have come, and how a gap is closed.

Rotary attention sees only differences of positions. So when tokens go from the middle, the few before them (the sinks)
are turned forward, and all those after them stay as they are: nothing that is quantised is rounded again but the sinks,
and those always from the keys that they had at first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from edgekit.cache import Storage
from edgekit.holding import Held
from edgekit.interfaces import Segment
from edgekit.segments import KeyValues
from edgekit_mlx.cache import LayerCache
from edgekit_mlx.positions import turned

if TYPE_CHECKING:
    from edgekit_mlx.engine import MlxEngine

# First keys kept beside the cache from the first eviction on, so that moving them never adds up roundings.
_MAX_ORIGINALS = 64


class MlxState:
    """What one sequence has fed. Its arrays are its own, so closing it frees them."""

    def __init__(self, engine: MlxEngine, storage: Storage) -> None:
        self._engine, self.storage = engine, storage
        layers = engine.plan.model.layers
        self.caches = [
            LayerCache(layer, storage.capacity_tokens, storage.kv_bits, engine.score_bytes) for layer in layers
        ]
        mx.eval(self.arrays())
        self.held = Held(storage)
        self._origin = 0  # the position that the first held token is turned as
        self._originals: list[mx.array] = []  # a layer's first keys in float32, turned as if the origin were 0

    @property
    def position(self) -> int:
        return self.held.position

    @property
    def length(self) -> int:
        return self.held.length

    @property
    def deep(self) -> int:
        """Tokens that went through every layer; those after them left at an exit."""
        return self.held.deep

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in [*self.arrays(), *self._originals])

    @property
    def turned_from(self) -> int:
        """The position that the next token is turned as."""
        return self._origin + self.held.length

    @property
    def form(self) -> str:
        """How its keys and values are held."""
        return f"{self.storage.kv_bits}-bit"

    def arrays(self) -> list[mx.array]:
        return [array for cache in self.caches for array in cache.arrays]

    def rewind(self, count: int) -> None:
        self.held.rewind(count)
        if self._originals and self._originals[0].shape[1] > self.held.length:
            self._on_worker(lambda: self._keep_originals(self.held.length))

    def evict(self, start: int, stop: int) -> None:
        self.held.check_evict(start, stop)
        if start < stop:
            self._on_worker(lambda: self._evict(start, stop))

    def save(self, start: int, stop: int) -> KeyValues:
        self.held.check_save(start, stop)
        arrays = self._on_worker(lambda: [np.array(array[:, start:stop]) for array in self.arrays()])
        return KeyValues(self._engine.key_of(self.storage.adapter), self.form, start, arrays)

    def restore(self, segment: Segment) -> None:
        found = self.held.check_restore(segment, self._engine.key_of(self.storage.adapter), self.form)
        if found.tokens:
            self._on_worker(lambda: self._restore(found))
            self.held.fed(found.tokens, all_layers=True)

    def close(self) -> None:
        if self.held.is_open:
            self.held.is_open = False
            self._engine.states.remove(self)
            self.caches, self._originals = [], []

    def _restore(self, segment: KeyValues) -> None:
        stop = self.held.length + segment.tokens
        for array, saved in zip(self.arrays(), segment.arrays, strict=True):
            array[:, self.held.length : stop] = mx.array(saved)
        mx.eval(self.arrays())

    def _evict(self, start: int, stop: int) -> None:
        if stop < self.held.length:
            self._keep_originals(start)
            for cache in self.caches:
                cache.close_gap(start, stop, self.held.length)
            self._origin += stop - start
            self._place_originals()
        self.held.evicted(stop - start)

    def _keep_originals(self, count: int) -> None:
        """Have the first keys of the `count` first tokens, those that were known before as they were known."""
        known = self._originals[0].shape[1] if self._originals else 0
        kept = [original[:, :count] for original in self._originals]
        if count > known:
            fresh = self._turn([cache.keys(known, count) for cache in self.caches], -self._origin)
            kept = [mx.concatenate(list(pair), axis=1) for pair in zip(kept, fresh, strict=True)] if known else fresh
        self._originals = [mx.contiguous(each) for each in kept] if count else []
        mx.eval(self._originals)

    def _place_originals(self) -> None:
        """Write the first keys, turned as the origin says."""
        for cache, keys in zip(self.caches, self._turn(self._originals, self._origin), strict=False):
            cache.replace_keys(0, keys)
            mx.eval(cache.arrays)
        if self._originals and self._originals[0].shape[1] > _MAX_ORIGINALS:
            self._keep_originals(_MAX_ORIGINALS)

    def _turn(self, keys: list[mx.array], distance: int) -> list[mx.array]:
        """Keys [kv_heads, tokens, head_dim] of every layer, moved by some positions."""
        found, positions, layers = [], self._engine.positions, self._engine.plan.model.layers
        for each, layer in zip(keys, layers, strict=False):
            if layer.rope is None or distance == 0:
                found.append(each)
            else:
                found.append(turned(each, positions.turn(layer.rope, distance)))
        return found

    def _on_worker(self, work: Callable[[], list[np.ndarray] | None]) -> list[np.ndarray]:
        return self._engine.worker.run(work) or []
