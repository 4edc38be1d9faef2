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
from edgekit.errors import InvalidInput, Unsupported, clip
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
        self._length = self._position = self._deep = 0
        self._origin = 0  # the position that the first held token is turned as
        self._originals: list[mx.array] = []  # a layer's first keys in float32, turned as if the origin were 0
        self.is_open = True

    @property
    def position(self) -> int:
        return self._position

    @property
    def length(self) -> int:
        return self._length

    @property
    def deep(self) -> int:
        """Tokens that went through every layer; those after them left at an exit."""
        return self._deep

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in [*self.arrays(), *self._originals])

    @property
    def room(self) -> int:
        return self.storage.capacity_tokens - self._length

    @property
    def turned_from(self) -> int:
        """The position that the next token is turned as."""
        return self._origin + self._length

    @property
    def form(self) -> str:
        """How its keys and values are held."""
        return f"{self.storage.kv_bits}-bit"

    def arrays(self) -> list[mx.array]:
        return [array for cache in self.caches for array in cache.arrays]

    def fed(self, count: int, *, all_layers: bool) -> None:
        """The engine has appended `count` tokens."""
        self._length += count
        self._position += count
        if all_layers:
            self._deep = self._length

    def rewind(self, count: int) -> None:
        self._check_open()
        if not 0 <= count <= self._length:
            raise InvalidInput(f"cannot rewind {count} tokens; the state holds {self._length}")
        self._length -= count
        self._position -= count
        self._deep = min(self._deep, self._length)
        if self._originals and self._originals[0].shape[1] > self._length:
            self._on_worker(lambda: self._keep_originals(self._length))

    def evict(self, start: int, stop: int) -> None:
        self._check_open()
        if not 0 <= start <= stop <= self._length:
            raise InvalidInput(f"cannot evict tokens {start} to {stop}; the state holds {self._length}")
        if stop > self._deep:
            raise InvalidInput("cannot evict while tokens of an early exit are held; rewind them first")
        if start < stop:
            self._on_worker(lambda: self._evict(start, stop))

    def save(self, start: int, stop: int) -> KeyValues:
        self._check_open()
        if self._position != self._length:
            raise Unsupported("a state that evicted tokens cannot be saved; save the prefix before the first eviction")
        if not 0 <= start <= stop <= self._deep:
            raise InvalidInput(f"cannot save tokens {start} to {stop}; the state holds {self._deep}")
        arrays = self._on_worker(lambda: [np.array(array[:, start:stop]) for array in self.arrays()])
        return KeyValues(self._engine.model_key, self.form, start, arrays)

    def restore(self, segment: Segment) -> None:
        self._check_open()
        if not isinstance(segment, KeyValues) or segment.model != self._engine.model_key:
            raise InvalidInput(f"{clip(segment)} was not saved by this model")
        if segment.form != self.form:
            raise InvalidInput(f"the segment holds {segment.form} keys and values, the state {self.form}")
        if segment.start != self._position or self._position != self._length or self._deep != self._length:
            raise InvalidInput(
                f"the segment begins at position {segment.start}; the state stands at {self._position} "
                f"and holds {self._length}"
            )
        if segment.tokens > self.room:
            raise InvalidInput(f"the segment has {segment.tokens} tokens and the state has room for {self.room}")
        if segment.tokens:
            self._on_worker(lambda: self._restore(segment))
            self.fed(segment.tokens, all_layers=True)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._engine.states.remove(self)
            self.caches, self._originals = [], []

    def _restore(self, segment: KeyValues) -> None:
        stop = self._length + segment.tokens
        for array, saved in zip(self.arrays(), segment.arrays, strict=True):
            array[:, self._length : stop] = mx.array(saved)
        mx.eval(self.arrays())

    def _evict(self, start: int, stop: int) -> None:
        if stop < self._length:
            self._keep_originals(start)
            for cache in self.caches:
                cache.close_gap(start, stop, self._length)
            self._origin += stop - start
            self._place_originals()
        self._length -= stop - start
        self._deep -= stop - start

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

    def _check_open(self) -> None:
        if not self.is_open:
            raise InvalidInput("the state is closed")
