"""The state of one request on a fake engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from edgekit.contracts.capabilities import Capabilities
from edgekit.contracts.engine import CachedKV, Segment
from edgekit.contracts.kv_policy import Eviction, KVCacheConfig
from edgekit.contracts.recurrent import most_checkpoints
from edgekit.enginekit.keeping import ByCache, attended, consensus, find_scorer
from edgekit.enginekit.recurrent import RecurrentPart
from edgekit.errors import InvalidInput, Unsupported
from edgekit.testing.fake_segment import FakeSegment

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.enginekit.recurrent import Values

WIDTH = 16  # values that a layer keeps of each token


class FakeOwner(Protocol):
    """The part of a fake engine that its states use."""

    capabilities: Capabilities
    layers: int
    states: list[FakeState]

    def state_bytes(self, storage: KVCacheConfig) -> int: ...
    def identity(self, storage: KVCacheConfig) -> str: ...
    def settle(self, state: FakeState) -> None: ...
    def embedded(self, tokens: Sequence[int]) -> NDArray[np.float32]: ...
    def attention(self, state: FakeState, newest: int) -> Iterator[NDArray[np.float32]]: ...


class FakeState:
    """The state of one request on a fake engine."""

    def __init__(self, engine: FakeOwner, storage: KVCacheConfig) -> None:
        self._engine: FakeOwner | None = engine
        self.storage = storage
        self.position = 0
        self.length = 0
        self.has_evicted = False
        self.partial = 0  # number of newest tokens that were fed with an early exit
        dtype = np.int8 if storage.kv_bits == 8 else np.int16
        self.values = np.zeros((engine.layers, storage.capacity_tokens, WIDTH), dtype)
        self.sums = np.zeros(WIDTH)  # the recurrent part
        self.recurrent: RecurrentPart | None = None
        spacing = engine.capabilities.checkpoint_tokens
        if spacing is not None:
            most = most_checkpoints(spacing, storage.capacity_tokens)
            empty = (np.zeros_like(self.sums),)
            self.recurrent = RecurrentPart(spacing, most, empty, lambda: (self.sums.copy(),), self._set_sums)

    def _set_sums(self, values: Values) -> None:
        self.sums = values[0].copy()

    @property
    def bytes(self) -> int:
        return self.engine.state_bytes(self.storage)

    @property
    def next_position(self) -> int:
        return self.length

    def cached(self, layer: int, start: int, stop: int) -> CachedKV:
        if layer not in self.engine.capabilities.kv_layers:
            raise Unsupported(f"this engine hands out no keys and values of layer {layer}")
        if not 0 <= start < stop <= self.length or self.partial:
            raise InvalidInput(f"cannot read tokens {start} to {stop} of {self.length} held")
        values = self.values[layer, None, start:stop].astype(np.float32)
        return CachedKV(values, values)

    def embedded(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        return self.engine.embedded(tokens)

    @property
    def num_replayed(self) -> int:
        return 0 if self.recurrent is None else self.position - self.recurrent.position

    def step_back(self, count: int) -> None:
        self.position -= count
        self.length -= count

    @property
    def engine(self) -> FakeOwner:
        if self._engine is None:
            raise InvalidInput("this state is closed; start a new one")
        return self._engine

    def rewind(self, count: int) -> None:
        most = self.engine.capabilities.max_rewind
        if not 0 <= count <= self.length or (most is not None and count > most):
            raise InvalidInput(f"cannot rewind {count} of {self.length} held tokens (at most {most})")
        if self.recurrent is not None:
            self.recurrent.rewind(self.position - count)
        self.step_back(count)
        self.partial = max(0, self.partial - count)

    def evict_spans(self, spans: Sequence[Eviction]) -> None:
        if any(later.start < span.stop for span, later in pairwise(spans)):
            raise InvalidInput("spans to evict must be in order and apart")
        for start, stop in reversed(spans):
            self.evict(start, stop)

    def scores(self, keep: str, start: int, newest: Sequence[int] = ()) -> NDArray[np.float32]:
        if keep not in self.engine.capabilities.scorers:
            raise Unsupported(f"this engine cannot score tokens by {keep}; open it without")
        if not 0 <= start < self.length or self.partial:
            raise InvalidInput(f"cannot score tokens from {start} on; {self.length} are held")
        scorer = find_scorer(keep)
        if isinstance(scorer, ByCache):
            cached = self.values[:, None, start : self.length]
            return consensus(scorer, zip(cached, cached, strict=True))
        count = min(scorer.newest, len(newest))
        if not 0 < count <= self.length:
            raise InvalidInput(f"scores by {keep} need the newest tokens; {len(newest)} were given")
        return attended(scorer, self.engine.attention(self, count))[start:]

    def evict(self, start: int, stop: int) -> None:
        if not self.engine.capabilities.can_evict:
            raise Unsupported("this engine cannot evict; open it without a window")
        if not 0 <= start <= stop <= self.length:
            raise InvalidInput(f"cannot evict tokens {start} to {stop} of {self.length} held")
        if self.recurrent is not None and stop > start:
            self.engine.settle(self)
            self.recurrent.evict(self.position)
        kept = self.values[:, stop : self.length].copy()
        self.values[:, start : start + kept.shape[1]] = kept
        self.length -= stop - start
        self.has_evicted = self.has_evicted or stop > start

    def save(self, start: int, stop: int) -> FakeSegment:
        if not self.engine.capabilities.can_save:
            raise Unsupported("this engine cannot save the KV of its states")
        if self.has_evicted and (start or not self.engine.capabilities.can_save_evicted):
            raise Unsupported("this state cannot be saved after an eviction, or only from its first token on")
        if not 0 <= start <= stop <= self.length - self.partial:
            raise InvalidInput(f"cannot save tokens {start} to {stop} of {self.length} held")
        values, model = self.values[:, start:stop].copy(), self.engine.identity(self.storage)
        if self.recurrent is None:
            return FakeSegment(values, model, evicted=self.position - self.length)
        kept = {at - start: copy for at, copy in self.recurrent.checkpoints(start, stop).items()}
        return FakeSegment(values, model, self.recurrent.tokens(start, stop).tolist(), kept)

    def save_bytes(self, start: int, stop: int) -> int:
        return self.save(start, stop).bytes

    def restore(self, segment: Segment) -> None:
        expected = self.engine.identity(self.storage)
        if not isinstance(segment, FakeSegment) or segment.model != expected:
            raise InvalidInput("this segment is of another model, adapter or cache width")
        if self.length + segment.tokens > self.storage.capacity_tokens:
            raise InvalidInput(f"a segment of {segment.tokens} tokens does not fit after {self.length}")
        self.values[:, self.length : self.length + segment.tokens] = segment.values
        if self.recurrent is not None:
            kept = {self.position + at: copy for at, copy in segment.checkpoints.items()}
            self.recurrent.restore(segment.ids, kept)
        if segment.evicted and self.position:
            raise InvalidInput("a segment saved after evictions is only restored into an empty state")
        self.has_evicted = self.has_evicted or segment.evicted > 0
        self.length += segment.tokens
        self.position += segment.tokens + segment.evicted

    def close(self) -> None:
        if self._engine is not None:
            self._engine.states.remove(self)
            self._engine = None
