"""A small real model in integers: its logits depend on every cached token and on its distance.

All arithmetic is exact, so logits never depend on chunking, drafting, reuse or batching, and any mistake in rewind,
evict, restore or positions changes them. With `checkpoint_tokens` it has a recurrent layer before the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from edgekit.common.parsing import read_json
from edgekit.contracts.capabilities import Capabilities
from edgekit.contracts.engine import CachedKV, Chunk
from edgekit.contracts.kv_policy import Eviction, KVCacheConfig
from edgekit.contracts.recurrent import most_checkpoints
from edgekit.enginekit.base import EngineBase
from edgekit.enginekit.keeping import scorers
from edgekit.enginekit.kv_segment import KeyValues, SegmentPart, read_key_values
from edgekit.enginekit.state import StateBase
from edgekit.errors import InvalidInput, TargetFailed, Unsupported, quote_short
from edgekit.testing.plan import FAKE, fake_model, fake_plan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.contracts.engine import Logits
    from edgekit.enginekit.recurrent import Values

WIDTH = 16  # values that a layer keeps of each token
_MODULUS = 127  # values stay within ±63, so that eight bits hold them exactly
_DISTANCES = 4096
_MOST_TOKENS = 1 << 16  # that a state holds
_SCALE = 64.0


class FakeState(StateBase):
    """The state of one request on a fake engine."""

    def __init__(self, engine: FakeEngine, storage: KVCacheConfig) -> None:
        super().__init__(engine, storage)
        self.engine = engine
        dtype = np.int8 if storage.kv_bits == 8 else np.int16
        self.values = np.zeros((engine.layers, storage.capacity_tokens, WIDTH), dtype)
        self.sums = np.zeros(WIDTH)  # the recurrent part

    def start_recurrent(self, spacing: int, shapes: Sequence[tuple[int, ...]]) -> None:
        super().start_recurrent(spacing, [(WIDTH,)])

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


class FakeAdapter(NamedTuple):
    """An adapter made from `seed`: what it adds to the embeddings."""

    seed: int
    values: NDArray[np.float64]

    @property
    def sha256(self) -> str:
        return str(self.seed)

    @property
    def bytes(self) -> int:
        return self.values.nbytes


class FakeEngine(EngineBase[FakeState, FakeAdapter]):
    """A model made from `seed`; with one layer, evictions leave no trace."""

    target = FAKE

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
        super().__init__(fake_plan(fake_model(vocabulary=vocabulary, layers=layers), context=_MOST_TOKENS))
        self.layers, self.seed, self.threads, self.checkpoint_tokens = layers, seed, threads, checkpoint_tokens
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
        self.forwards = 0  # calls so far
        self.failures: set[int] = set()  # calls, counted from 1, that raise as a failing vendor library would

    @property
    def closed(self) -> bool:
        return self._is_closed

    @property
    def model_key(self) -> str:
        return f"{self.seed}-{self.capabilities.vocabulary}-{self.layers}"

    def form(self, kv_bits: int) -> str:
        return f"{kv_bits} bits"

    def parts(self, kv_bits: int) -> list[SegmentPart]:
        return [SegmentPart(1, WIDTH, np.dtype(f"i{kv_bits // 8}"))] * self.layers

    def state_bytes(self, storage: KVCacheConfig) -> int:
        self._check_storage(storage)
        spacing, tokens = self.capabilities.checkpoint_tokens, storage.capacity_tokens
        recurrent = 0 if spacing is None else 4 * tokens + (2 + most_checkpoints(spacing, tokens)) * WIDTH * 4
        return self.layers * tokens * WIDTH * storage.kv_bits // 8 + recurrent

    def forward(self, chunks: Sequence[Chunk]) -> list[Logits]:
        self.forwards += 1
        return super().forward(chunks)

    def attention(self, state: FakeState, newest: int) -> Iterator[NDArray[np.float32]]:
        """Yield by layer the newest tokens' attention to every cached one: its reach times its largest value."""
        distance = np.arange(state.length - newest, state.length)[:, None] - np.arange(state.length)
        for layer in range(self.layers):
            reach = np.where(distance >= 0, self._reach[layer][distance % _DISTANCES], 0.0)
            largest = np.abs(state.values[layer, : state.length].astype(np.float32)).max(axis=1)
            yield (reach.sum(axis=0, keepdims=True) * largest).astype(np.float32)

    def read_segment(self, path: Path) -> KeyValues:
        forms = {self.form(bits): self.segment_parts(bits) for bits in self.capabilities.kv_bits}
        models = [self.key_of(adapter) for adapter in (None, *self.adapters)]
        shapes, most = ([], 0) if self.checkpoint_tokens is None else ([(WIDTH,)], _MOST_TOKENS)
        return read_key_values(path, models, forms, _MOST_TOKENS, recurrent=shapes, most_checkpoints=most)

    def load_adapter(self, name: str, files: Path) -> int:
        """Load an adapter; `adapter.json` in `files` holds {"seed": N}."""
        self._check_open()
        if name in self.adapters:
            raise InvalidInput(f"adapter {quote_short(name)} is loaded already; drop it first")
        seed = read_json(files / "adapter.json").get("seed")
        if not isinstance(seed, int) or seed < 0:
            raise InvalidInput(f"{files / 'adapter.json'}: seed must be a whole number, found {quote_short(seed)}")
        random = np.random.default_rng([seed, self.seed])
        self.adapters[name] = FakeAdapter(seed, random.integers(-9, 10, self._embedding.shape).astype(np.float64))
        return self.adapters[name].bytes

    def _start(self, storage: KVCacheConfig) -> FakeState:
        return FakeState(self, storage)

    def _embedded(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = self._embedding[np.asarray(tokens)].astype(np.float32)
        return rows

    def _use_threads(self, count: int) -> None:
        self.threads = count

    def _close(self) -> None:
        """Nothing is left to free."""

    def _forward(self, states: Sequence[FakeState], chunks: Sequence[Chunk]) -> list[Logits]:
        if self.forwards in self.failures:
            raise TargetFailed(f"fake: call {self.forwards} was told to fail")
        return [self._feed(state, chunk) for state, chunk in zip(states, chunks, strict=True)]

    def _feed(self, state: FakeState, chunk: Chunk) -> Logits:
        old, count = state.length, len(chunk.tokens)
        inputs = self._embedding[np.asarray(chunk.tokens)]
        if state.storage.adapter is not None:
            inputs = inputs + self.adapters[state.storage.adapter].values[np.asarray(chunk.tokens)]
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


def _fold(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fold integers into ±63: the only nonlinear step. It is chaotic, so that every difference shows."""
    return np.mod(sums, _MODULUS) - 63
