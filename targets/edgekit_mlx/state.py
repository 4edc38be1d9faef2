"""One sequence on MLX: a cache for each layer that stores keys and values, evictions from the middle, recurrent parts.

Rotary attention depends only on differences of positions. When tokens are evicted from the middle, the tokens before
the gap are rotated forward and all later tokens stay unchanged. In a window of the newest tokens those are the few
sinks. So only these are quantised again, always from their original keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from edgekit.contracts.engine import CachedKV
from edgekit.contracts.kv_policy import Eviction, KVCacheConfig
from edgekit.contracts.recurrent import recurrent_arrays
from edgekit.enginekit.recurrent import Values
from edgekit.enginekit.rope_shift import runs_between
from edgekit.enginekit.state import StateBase, StateOwner
from edgekit.model.spec import ModelSpec
from edgekit_mlx.kv_cache import LayerCache
from edgekit_mlx.rope import RopeTables, rotate_keys
from edgekit_mlx.worker import MlxThread

# The most original keys to keep in addition to the cache: rotating from them never accumulates rounding errors.
_MAX_ORIGINALS = 64
_PIECE_TOKENS = 512


class MlxState(StateBase):
    """The caches of one sequence. Closing the state frees them."""

    def __init__(
        self,
        owner: StateOwner,
        storage: KVCacheConfig,
        model: ModelSpec,
        ropes: RopeTables,
        worker: MlxThread,
        score_bytes: int,
    ) -> None:
        """Allocate the caches. Call it on the engine's thread."""
        super().__init__(owner, storage)
        layers = [model.layers[index] for index in model.storing_layers]
        self._layers, self._ropes, self._worker = layers, ropes, worker
        self._places = {layer: position for position, layer in enumerate(model.storing_layers)}  # of caches
        self.caches = [LayerCache(layer, storage.capacity_tokens, storage.kv_bits, score_bytes) for layer in layers]
        # What recurrent layers carry from token to token, by layer; a call replaces the arrays.
        self.carried: dict[int, tuple[mx.array, ...]] = {}
        for part in recurrent_arrays(model):
            self.carried[part.layer] = (*self.carried.get(part.layer, ()), mx.zeros(part.shape))
        mx.eval(self.arrays(), self.carried)
        self._origin = 0  # the rotary position of the first token
        self._originals: list[mx.array] = []  # by layer: first keys in float32, rotated for origin 0

    @property
    def bytes(self) -> int:
        return super().bytes + sum(keys.nbytes for keys in self._originals)

    @property
    def next_position(self) -> int:
        """The rotary position of the next token."""
        return self._origin + self.length

    def arrays(self) -> list[mx.array]:
        return [array for cache in self.caches for array in cache.arrays]

    def rewind(self, count: int) -> None:
        super().rewind(count)
        if self._originals and self._originals[0].shape[1] > self.length:
            self._worker.run(lambda: self._keep_originals(self.length))

    def close(self) -> None:
        super().close()
        self.caches, self.carried, self._originals = [], {}, []

    def _evict(self, spans: Sequence[Eviction]) -> None:
        self._worker.run(lambda: self._close_gaps(spans))

    def _cached_layers(self, start: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        for cache in self.caches:
            for head in range(cache.kv_heads):
                yield self._worker.run(lambda: cache.head(head, start, self.length))  # noqa: B023

    def _cached(self, layer: int, start: int, stop: int) -> CachedKV:
        return self._worker.run(lambda: self.caches[self._places[layer]].read(start, stop))

    def _read(self, start: int, stop: int) -> list[NDArray[Any]]:
        return self._worker.run(lambda: [np.array(array[:, start:stop]) for array in self.arrays()])

    def _write(self, arrays: Sequence[NDArray[Any]]) -> None:
        def write() -> None:
            for array, saved in zip(self.arrays(), arrays, strict=True):
                array[:, self.length : self.length + saved.shape[1]] = mx.array(saved)
            mx.eval(self.arrays())

        self._worker.run(write)

    def _read_recurrent(self) -> Values:
        return self._worker.run(lambda: tuple(np.array(array) for arrays in self.carried.values() for array in arrays))

    def _write_recurrent(self, values: Values) -> None:
        def write() -> None:
            rest = iter(values)
            for layer, arrays in self.carried.items():  # one by one, so that few are held twice
                self.carried[layer] = tuple(mx.array(next(rest)) for _ in arrays)

        self._worker.run(write)

    def _close_gaps(self, spans: Sequence[Eviction]) -> None:
        """Rotate every kept key once: forward by the number of tokens that are dropped after it."""
        runs = [run for run in runs_between(spans, self.length) if run.start < run.stop]
        if not runs:
            return  # no token is left after the gaps
        first, dropped = spans[0].start, runs[-1].start - runs[-1].place
        self._keep_originals(min(first, _MAX_ORIGINALS))
        if first > _MAX_ORIGINALS:
            self._rotate(_MAX_ORIGINALS, first, dropped)
        for run in runs[:-1]:
            self._rotate(run.start, run.stop, dropped - (run.start - run.place))
        for run in runs:
            for cache in self.caches:
                cache.shift_kv(run.place, run.start, run.stop)
        self._origin += dropped
        self._place_originals()

    def _rotate(self, start: int, stop: int, distance: int) -> None:
        """Rotate the keys of tokens `start` to `stop` where they are, a few tokens of a layer at a time."""
        for cache, layer in zip(self.caches, self._layers, strict=True):
            if layer.rope is None:
                continue
            turn = self._ropes.rotation(layer.rope, distance)
            for piece in range(start, stop, _PIECE_TOKENS):
                cache.replace_keys(piece, rotate_keys(cache.keys(piece, min(stop, piece + _PIECE_TOKENS)), turn))
                mx.eval(cache.arrays)

    def _keep_originals(self, count: int) -> None:
        """Keep the original keys of the first `count` tokens; read only those from the cache that are not kept yet."""
        known = self._originals[0].shape[1] if self._originals else 0
        kept = [original[:, :count] for original in self._originals]
        if count > known:
            fresh = self._rotated([cache.keys(known, count) for cache in self.caches], -self._origin)
            kept = [mx.concatenate(list(pair), axis=1) for pair in zip(kept, fresh, strict=True)] if known else fresh
        self._originals = [mx.contiguous(keys) for keys in kept] if count else []
        mx.eval(self._originals)

    def _place_originals(self) -> None:
        """Write the original keys to the caches, rotated to the present origin."""
        for cache, keys in zip(self.caches, self._rotated(self._originals, self._origin), strict=False):
            cache.replace_keys(0, keys)
            mx.eval(cache.arrays)

    def _rotated(self, keys: Sequence[mx.array], distance: int) -> list[mx.array]:
        """Return the keys [kv_heads, tokens, head_dim] of every layer, rotated by `distance` positions."""
        return [
            each
            if layer.rope is None or distance == 0
            else rotate_keys(each, self._ropes.rotation(layer.rope, distance))
            for each, layer in zip(keys, self._layers, strict=False)
        ]
