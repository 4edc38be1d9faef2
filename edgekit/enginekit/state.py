"""The base class of an engine's states: checks, counting, saving and scoring, the same on every target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekit.contracts.capabilities import Capabilities
from edgekit.contracts.engine import CachedKV, Segment
from edgekit.contracts.kv_policy import Eviction, KVCacheConfig
from edgekit.contracts.recurrent import most_checkpoints
from edgekit.enginekit.bookkeeping import Held
from edgekit.enginekit.keeping import ByCache, attended, consensus, find_scorer
from edgekit.enginekit.kv_segment import KeyValues, SegmentPart
from edgekit.enginekit.recurrent import RecurrentPart, Values, empty_part
from edgekit.errors import InvalidInput, Unsupported


class StateOwner(Protocol):
    """The part of an engine that its states use."""

    capabilities: Capabilities

    def form(self, kv_bits: int) -> str: ...
    def key_of(self, adapter: str | None) -> str: ...
    def state_bytes(self, storage: KVCacheConfig) -> int: ...
    def segment_parts(self, kv_bits: int) -> list[SegmentPart]: ...
    def embedded(self, tokens: Sequence[int]) -> NDArray[np.float32]: ...
    def settle(self, state: Any) -> None: ...
    def remove(self, state: Any) -> None: ...


class StateBase(ABC):
    """One sequence. Subclasses move its keys and values; this class counts its tokens."""

    saves_evicted: ClassVar[bool] = False  # `save` also works after evictions
    recurrent: RecurrentPart | None = None  # None: the model has none

    def __init__(self, owner: StateOwner, storage: KVCacheConfig) -> None:
        self._owner, self.storage, self.held = owner, storage, Held(storage)

    def start_recurrent(self, spacing: int, shapes: Sequence[tuple[int, ...]]) -> None:
        """Start tracking the recurrent part, which is zero in the engine's memory."""
        most, empty = most_checkpoints(spacing, self.storage.capacity_tokens), empty_part(shapes)
        self.recurrent = RecurrentPart(spacing, most, empty, self._read_recurrent, self._write_recurrent)

    @property
    def position(self) -> int:
        return self.held.position

    @property
    def length(self) -> int:
        return self.held.length

    @property
    def next_position(self) -> int:
        return self.length

    @property
    def bytes(self) -> int:
        return self._owner.state_bytes(self.storage)

    @property
    def num_replayed(self) -> int:
        return 0 if self.recurrent is None else self.position - self.recurrent.position

    @property
    def kept(self) -> int:
        """The number of tokens of this call to include in the recurrent part."""
        return 0 if self.recurrent is None else self.recurrent.kept

    def rewind(self, count: int) -> None:
        most = self._owner.capabilities.max_rewind
        if most is not None and count > most:
            raise InvalidInput(f"cannot rewind {count} tokens; this engine goes back {most} at most")
        if self.recurrent is not None and 0 <= count <= self.length:
            self.recurrent.rewind(self.position - count)
        self.held.rewind(count)

    def step_back(self, count: int) -> None:
        """Uncount the last `count` tokens, which the next call processes again for the recurrent part."""
        self.held.rewind(count)

    def evict(self, start: int, stop: int) -> None:
        self.evict_spans([Eviction(start, stop)])

    def evict_spans(self, spans: Sequence[Eviction]) -> None:
        if not self._owner.capabilities.can_evict:
            raise Unsupported("tokens of this model cannot be evicted on this target; plan without a window")
        self.held.check_evict(spans)
        if dropped := [span for span in spans if span.start < span.stop]:
            if self.recurrent is not None:
                self._owner.settle(self)
                self.recurrent.evict(self.position)
            self._evict(dropped)
            self.held.remove(sum(stop - start for start, stop in dropped))

    def scores(self, keep: str, start: int, newest: Sequence[int] = ()) -> NDArray[np.float32]:
        self.held.check_scores(start)
        scorer = find_scorer(keep)
        if keep not in self._owner.capabilities.scorers:
            raise Unsupported(f"this engine gives no {scorer.needs} to score by {keep}; open it with another window")
        if isinstance(scorer, ByCache):
            return consensus(scorer, self._cached_layers(start))
        newest = newest[-scorer.newest :]
        self.held.check_newest(newest, self._owner.capabilities.vocabulary)
        return attended(scorer, self._attention(newest))[start:]

    def cached(self, layer: int, start: int, stop: int) -> CachedKV:
        if layer not in self._owner.capabilities.kv_layers:
            raise Unsupported(f"this engine hands out no keys and values of layer {layer}")
        self.held.check_cached(start, stop)
        return self._cached(layer, start, stop)

    def embedded(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self.held.check_open()
        return self._owner.embedded(tokens)

    @property
    def _can_save_evicted(self) -> bool:
        return self.saves_evicted and self.recurrent is None

    def save(self, start: int, stop: int) -> KeyValues:
        self.held.check_save(start, stop, can_save_evicted=self._can_save_evicted)
        key, form = self._owner.key_of(self.storage.adapter), self._owner.form(self.storage.kv_bits)
        arrays = self._read(start, stop)
        if self.recurrent is None:
            return KeyValues(key, form, start, arrays, evicted=self.held.evicted)
        tokens = np.array(self.recurrent.tokens(start, stop), np.int32).reshape(1, -1, 1)
        return KeyValues(key, form, start, [tokens, *arrays], self.recurrent.checkpoints(start, stop))

    def save_bytes(self, start: int, stop: int) -> int:
        self.held.check_save(start, stop, can_save_evicted=self._can_save_evicted)
        size = (stop - start) * sum(part.token_bytes for part in self._owner.segment_parts(self.storage.kv_bits))
        recurrent = self.recurrent
        return size + (recurrent.num_checkpoints(start, stop) * recurrent.bytes if recurrent is not None else 0)

    def restore(self, segment: Segment) -> None:
        key, form = self._owner.key_of(self.storage.adapter), self._owner.form(self.storage.kv_bits)
        checked = self.held.check_restore(segment, key, form)
        if checked.tokens:
            self._write(checked.arrays[self.recurrent is not None :])
            self.held.append(checked.tokens, all_layers=True)
            self.held.position += checked.evicted
            if self.recurrent is not None:
                self.recurrent.restore(checked.arrays[0].reshape(-1).tolist(), checked.checkpoints)

    def close(self) -> None:
        if self.held.is_open:
            self.held.is_open = False
            self._owner.remove(self)

    @abstractmethod
    def _evict(self, spans: Sequence[Eviction]) -> None:
        """Move the tokens behind each span down and rotate their keys back. The caller then updates the length.

        Spans are not empty, and come in order. An engine that scores tokens rotates each key once for all of them.
        """

    def _cached_layers(self, start: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield each layer's keys and values [kv_head, token, head_dim] from token `start` on."""
        raise Unsupported("this engine cannot score cached tokens; keep the newest")

    def _cached(self, layer: int, start: int, stop: int) -> CachedKV:
        """Return keys and values of tokens that are cached, in float32; only for engines with `kv_layers`."""
        raise NotImplementedError(f"{type(self).__name__} declares kv_layers but hands out no keys and values")

    def _attention(self, newest: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Yield the attention [head, token] that the `newest` tokens, cached already, pay in each layer that caches.

        It is summed over the newest tokens. The state is left as it is.
        """
        raise Unsupported("this engine has no attention scores; keep tokens by another scorer")

    @abstractmethod
    def _read(self, start: int, stop: int) -> list[NDArray[Any]]:
        """Copy the keys and values of tokens `start` to `stop`, in the order of `EngineBase.parts`."""

    @abstractmethod
    def _write(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Append arrays from `_read` after the last token. The caller then updates the length."""

    def _read_recurrent(self) -> Values:
        """Copy the recurrent part; only for engines that run models with one."""
        raise NotImplementedError(f"{type(self).__name__} has no recurrent part")

    def _write_recurrent(self, values: Values) -> None:
        """Replace the recurrent part."""
        raise NotImplementedError(f"{type(self).__name__} has no recurrent part")
