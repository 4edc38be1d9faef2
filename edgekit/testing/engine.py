"""A small real model in integers: its logits depend on every cached token and on its distance.

All arithmetic is exact, so logits never depend on chunking, drafting, reuse or batching, and any mistake in rewind,
evict, restore or positions changes them. With `checkpoint_tokens` it has a recurrent layer before the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from edgekit.common.parsing import read_json
from edgekit.contracts.capabilities import Capabilities
from edgekit.contracts.engine import CachedKV, Chunk
from edgekit.contracts.kv_policy import Eviction, KVCacheConfig
from edgekit.contracts.recurrent import most_checkpoints
from edgekit.enginekit.bookkeeping import check_chunk
from edgekit.enginekit.keeping import scorers
from edgekit.enginekit.kv_segment import KeyValues, SegmentPart, read_key_values
from edgekit.enginekit.recurrent import forward_in_pieces
from edgekit.enginekit.state import StateBase
from edgekit.errors import InvalidInput, TargetFailed, UnknownName, Unsupported, quote_short

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.contracts.engine import Logits, State
    from edgekit.enginekit.recurrent import Values

WIDTH = 16  # values that a layer keeps of each token
_MODULUS = 127  # values stay within ±63, so that eight bits hold them exactly
_DISTANCES = 4096
_SCALE = 64.0


class FakeState(StateBase):
    """The state of one request on a fake engine."""

    def __init__(self, engine: FakeEngine, storage: KVCacheConfig) -> None:
        super().__init__(engine, storage)
        self.engine = engine
        dtype = np.int8 if storage.kv_bits == 8 else np.int16
        self.values = np.zeros((engine.layers, storage.capacity_tokens, WIDTH), dtype)
        self.sums = np.zeros(WIDTH)  # the recurrent part
        if engine.capabilities.checkpoint_tokens is not None:
            self.start_recurrent(engine.capabilities.checkpoint_tokens, [(WIDTH,)])

    @property
    def _can_save_evicted(self) -> bool:
        return self.engine.capabilities.can_save_evicted

    def save(self, start: int, stop: int) -> KeyValues:
        if not self.engine.capabilities.can_save:
            raise Unsupported("this engine cannot save the KV of its states")
        return super().save(start, stop)

    def _evict(self, spans: Sequence[Eviction]) -> None:
        length = self.length
        for start, stop in reversed(spans):
            kept = self.values[:, stop:length].copy()
            self.values[:, start : start + kept.shape[1]] = kept
            length -= stop - start

    def _cached_layers(self, start: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        cached = self.values[:, None, start : self.length]
        return zip(cached, cached, strict=True)

    def _cached(self, layer: int, start: int, stop: int) -> CachedKV:
        values = self.values[layer, None, start:stop].astype(np.float32)
        return CachedKV(values, values)

    def _attention(self, newest: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        return self.engine.attention(self, len(newest))

    def _read(self, start: int, stop: int) -> list[NDArray[Any]]:
        return [layer[None, start:stop].copy() for layer in self.values]

    def _write(self, arrays: Sequence[NDArray[Any]]) -> None:
        for layer, array in zip(self.values, arrays, strict=True):
            layer[self.length : self.length + array.shape[1]] = array[0]

    def _read_recurrent(self) -> Values:
        return (self.sums.astype(np.float32),)

    def _write_recurrent(self, values: Values) -> None:
        self.sums = values[0].astype(np.float64)


class FakeEngine:
    """A model made from `seed`; with one layer, evictions leave no trace."""

    def __init__(
        self,
        *,
        vocabulary: int = 300,
        layers: int = 2,
        seed: int = 0,
        max_states: int = 4,
        max_chunk_tokens: int = 64,
        max_rewind: int | None = None,
        max_position: int | None = None,
        can_evict: bool = True,
        can_save: bool = True,
        can_save_evicted: bool = True,
        checkpoint_tokens: int | None = None,
        exact: Literal["always", "on_request", "never"] = "always",
        feature_layers: Sequence[int] = (),
        gives_kv: bool = True,
        threads: int | None = None,
    ) -> None:
        self.layers, self.seed, self.threads = layers, seed, threads
        self.notes: tuple[str, ...] = ()
        self.capabilities = Capabilities(
            vocabulary=vocabulary,
            max_states=max_states,
            max_chunk_tokens=max_chunk_tokens,
            max_rewind=max_rewind,
            max_position=max_position,
            kv_bits=(16, 8),
            features=frozenset({"adapters", *(("evictions",) if can_evict else ())}),
            scorers=tuple(scorers()) if can_evict else (),
            can_save=can_save,
            can_save_evicted=can_save and can_save_evicted and checkpoint_tokens is None,
            exits=tuple(range(1, layers)) if checkpoint_tokens is None else (),
            feature_layers=tuple(feature_layers),
            feature_width=len(feature_layers) * WIDTH,
            kv_layers=tuple(range(layers)) if gives_kv else (),
            checkpoint_tokens=checkpoint_tokens,
            hidden_size=WIDTH,
            threads=threads,
            exact=exact,
        )
        random = np.random.default_rng([seed, vocabulary])
        self._embedding = random.integers(-63, 64, (vocabulary, WIDTH)).astype(np.float64)
        self._reach = random.integers(1, 8, (layers, _DISTANCES)).astype(np.float64)
        self._head = random.integers(-3, 4, (WIDTH, vocabulary)).astype(np.float64)
        self._mix = random.integers(-9, 10, (WIDTH, WIDTH)).astype(np.float64)
        self._adapters: dict[str, NDArray[np.float64]] = {}
        self._adapter_seeds: dict[str, int] = {}
        self.states: list[FakeState] = []
        self.forwards = 0  # calls so far
        self.failures: set[int] = set()  # calls, counted from 1, that raise as a failing vendor library would
        self.closed = self._is_interrupted = False

    def embedded(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self._check_open()
        if not self.capabilities.kv_layers or min(tokens) < 0 or max(tokens) >= self.capabilities.vocabulary:
            raise InvalidInput(f"no embeddings of tokens {list(tokens)}")
        rows: NDArray[np.float32] = self._embedding[np.asarray(tokens)].astype(np.float32)
        return rows

    def start(self, storage: KVCacheConfig) -> FakeState:
        self._check_open()
        self._check_storage(storage)
        if len(self.states) >= self.capabilities.max_states:
            raise InvalidInput(f"all {self.capabilities.max_states} states are in use; close one first")
        self.states.append(FakeState(self, storage))
        return self.states[-1]

    def state_bytes(self, storage: KVCacheConfig) -> int:
        self._check_storage(storage)
        spacing, tokens = self.capabilities.checkpoint_tokens, storage.capacity_tokens
        recurrent = 0 if spacing is None else 4 * tokens + (2 + most_checkpoints(spacing, tokens)) * WIDTH * 4
        return self.layers * tokens * WIDTH * storage.kv_bits // 8 + recurrent

    def forward(self, chunks: Sequence[Chunk]) -> list[Logits]:
        self._check_open()
        self.forwards += 1
        states = [self._own_state(chunk.state) for chunk in chunks]
        try:
            if self._is_interrupted:
                raise TargetFailed("fake: the call was interrupted; open the artifact again")
            if self.forwards in self.failures:
                raise TargetFailed(f"fake: call {self.forwards} was told to fail")
            if len({id(state) for state in states}) < len(states):
                raise InvalidInput("a state occurs twice in one call")
            for state, chunk in zip(states, chunks, strict=True):
                check_chunk(chunk, state.held, self.capabilities)
            return self._feed_all(states, chunks)
        except BaseException:
            for state in states:
                state.close()
            raise

    def settle(self, state: FakeState) -> None:
        """Replay the tokens that the recurrent part of a rewound or restored state lacks."""
        if state.num_replayed:
            self._feed_all([state], [Chunk(state, (), 0)])

    def attention(self, state: FakeState, newest: int) -> Iterator[NDArray[np.float32]]:
        """Yield by layer the newest tokens' attention to every cached one: its reach times its largest value."""
        distance = np.arange(state.length - newest, state.length)[:, None] - np.arange(state.length)
        for layer in range(self.layers):
            reach = np.where(distance >= 0, self._reach[layer][distance % _DISTANCES], 0.0)
            largest = np.abs(state.values[layer, : state.length].astype(np.float32)).max(axis=1)
            yield (reach.sum(axis=0, keepdims=True) * largest).astype(np.float32)

    def read_segment(self, path: Path) -> KeyValues:
        forms = {self.form(bits): self.segment_parts(bits) for bits in self.capabilities.kv_bits}
        models = [self.key_of(adapter) for adapter in (None, *self._adapters)]
        shapes, most = ([(WIDTH,)], _DISTANCES) if self._is_recurrent else ([], 0)
        return read_key_values(path, models, forms, _DISTANCES, recurrent=shapes, most_checkpoints=most)

    def load_adapter(self, name: str, files: Path) -> int:
        """Load an adapter; `adapter.json` in `files` holds {"seed": N}."""
        self._check_open()
        if name in self._adapters:
            raise InvalidInput(f"adapter {quote_short(name)} is loaded already; drop it first")
        seed = read_json(files / "adapter.json").get("seed")
        if not isinstance(seed, int) or seed < 0:
            raise InvalidInput(f"{files / 'adapter.json'}: seed must be a whole number, found {quote_short(seed)}")
        random = np.random.default_rng([seed, self.seed])
        self._adapters[name] = random.integers(-9, 10, self._embedding.shape).astype(np.float64)
        self._adapter_seeds[name] = seed
        return self._adapters[name].nbytes

    def drop_adapter(self, name: str) -> None:
        if name not in self._adapters:
            raise UnknownName("adapter", name, self._adapters)
        if any(state.storage.adapter == name for state in self.states):
            raise InvalidInput(f"adapter {quote_short(name)} is in use; close its states first")
        del self._adapters[name], self._adapter_seeds[name]

    def use_threads(self, count: int) -> None:
        most = self.capabilities.threads
        if most is None:
            raise Unsupported("fake: the number of threads is fixed")
        if not 1 <= count <= most:
            raise InvalidInput(f"threads: must be 1 to {most}, found {count}")
        self.threads = count

    def interrupt(self) -> None:
        self._is_interrupted = True

    def close(self) -> None:
        for state in list(self.states):
            state.close()
        self.closed = True

    def key_of(self, adapter: str | None) -> str:
        """Return a text that a segment and a state must have in common."""
        seed = self._adapter_seeds[adapter] if adapter else None
        return f"{self.seed}-{self.capabilities.vocabulary}-{self.layers}-{seed}"

    def form(self, kv_bits: int) -> str:
        return f"{kv_bits} bits"

    def segment_parts(self, kv_bits: int) -> list[SegmentPart]:
        tokens = [SegmentPart(1, 1, np.dtype(np.int32))] if self._is_recurrent else []
        return tokens + [SegmentPart(1, WIDTH, np.dtype(f"i{kv_bits // 8}"))] * self.layers

    def remove(self, state: FakeState) -> None:
        self.states.remove(state)

    @property
    def _is_recurrent(self) -> bool:
        return self.capabilities.checkpoint_tokens is not None

    def _feed_all(self, states: Sequence[FakeState], chunks: Sequence[Chunk]) -> list[Logits]:
        if self.capabilities.checkpoint_tokens is None:
            return [self._feed(state, chunk) for state, chunk in zip(states, chunks, strict=True)]

        def feed(indices: list[int], calls: list[Chunk]) -> list[Logits]:
            return [self._feed(states[index], call) for index, call in zip(indices, calls, strict=True)]

        return forward_in_pieces(states, chunks, self.capabilities.max_chunk_tokens, feed)

    def _feed(self, state: FakeState, chunk: Chunk) -> Logits:
        old, count = state.length, len(chunk.tokens)
        inputs = self._embedding[np.asarray(chunk.tokens)]
        if state.storage.adapter is not None:
            inputs = inputs + self._adapters[state.storage.adapter][np.asarray(chunk.tokens)]
        hidden = _fold(inputs)
        if state.recurrent is not None:
            sums, hidden = state.sums, hidden.copy()
            for index, row in enumerate(hidden):
                sums = hidden[index] = _fold(self._mix @ sums + row)
                if index + 1 == state.recurrent.kept:
                    state.sums = sums.copy()
        outputs = []
        distance = np.arange(old, old + count)[:, None] - np.arange(old + count)[None, :]
        for layer in range(chunk.exit_layer or self.layers):
            state.values[layer, old : old + count] = hidden
            reach = np.where(distance >= 0, self._reach[layer][distance % _DISTANCES], 0.0)
            hidden = _fold(reach @ state.values[layer, : old + count].astype(np.float64))
            outputs.append(hidden)
        if chunk.features is not None:
            chunk.features[:] = np.concatenate(
                [outputs[layer - 1] for layer in self.capabilities.feature_layers], axis=1
            )
        state.held.append(count, all_layers=chunk.exit_layer is None)
        rows = hidden[count - chunk.num_logits :]
        return (rows if chunk.hidden else rows @ self._head / _SCALE).astype(np.float32)

    def _check_storage(self, storage: KVCacheConfig) -> None:
        if storage.kv_bits not in self.capabilities.kv_bits:
            raise Unsupported(f"{storage.kv_bits} cache bits; this engine holds {self.capabilities.kv_bits}")
        if storage.capacity_tokens < 1:
            raise InvalidInput(f"a state of {storage.capacity_tokens} tokens")
        if storage.adapter is not None and storage.adapter not in self._adapters:
            raise UnknownName("adapter", storage.adapter, self._adapters)

    def _own_state(self, state: State) -> FakeState:
        if not isinstance(state, FakeState) or state not in self.states:
            raise InvalidInput("the state is closed, or belongs to another engine")
        return state

    def _check_open(self) -> None:
        if self.closed:
            raise InvalidInput("this engine is closed; open the artifact again")


def _fold(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fold integers into ±63: the only nonlinear step. It is chaotic, so that every difference shows."""
    return np.mod(sums, _MODULUS) - 63
