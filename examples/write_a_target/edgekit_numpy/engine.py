"""The engine and its states: the cache of each request, and the calls that append to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgekit.common.files import file_sha256
from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import Eviction, KVCacheConfig
from edgekit.contracts.plan import Plan
from edgekit.enginekit.base import EngineBase, LoadedAdapter
from edgekit.enginekit.kv_segment import SegmentPart
from edgekit.enginekit.rope_shift import Rotation, runs_between, shift_kv
from edgekit.enginekit.state import StateBase
from edgekit.errors import vendor_errors
from edgekit_numpy import able
from edgekit_numpy.decoder import Decoder
from edgekit_numpy.files import WEIGHTS, read_weights

if TYPE_CHECKING:
    from edgekit.contracts.engine import Logits


class NumpyState(StateBase):
    """The keys and values of one request: [kv_head, token, head_dim] for each layer."""

    def __init__(self, engine: NumpyEngine, storage: KVCacheConfig) -> None:
        super().__init__(engine, storage)
        self._rotation = engine.rotation
        shapes = [(layer.kv_heads, storage.capacity_tokens, layer.head_dim) for layer in engine.plan.model.layers]
        self.keys = [np.zeros(shape, np.float32) for shape in shapes]
        self.values = [np.zeros(shape, np.float32) for shape in shapes]

    def _evict(self, spans: Sequence[Eviction]) -> None:
        for start, stop, place in runs_between(spans, self.length):
            rotations = self._rotation.back(start - place)
            for keys, values, rotation in zip(self.keys, self.values, rotations, strict=True):
                shift_kv(keys, place, start, stop, rotation)
                shift_kv(values, place, start, stop, None)

    def _read(self, start: int, stop: int) -> list[NDArray[Any]]:
        return [array[:, start:stop].copy() for array in (*self.keys, *self.values)]

    def _write(self, arrays: Sequence[NDArray[Any]]) -> None:
        for array, copy in zip((*self.keys, *self.values), arrays, strict=True):
            array[:, self.length : self.length + copy.shape[1]] = copy


class NumpyEngine(EngineBase[NumpyState, LoadedAdapter]):
    """One opened artifact. In exact mode tokens are processed one at a time, so results do not depend on chunks."""

    target = "numpy"
    runs_adapters = False

    def __init__(self, plan: Plan, files: Path, *, exact: bool = False) -> None:
        super().__init__(plan)
        self._exact = exact
        self._decoder = Decoder(plan.model, dict(read_weights(plan, files)), plan.context)
        self._model_key = file_sha256(files / WEIGHTS)
        self.rotation = Rotation(plan.model, plan.context)
        self.capabilities = able(plan.model).narrowed(plan)

    @property
    def model_key(self) -> str:
        return self._model_key

    def form(self, kv_bits: int) -> str:
        return f"{kv_bits}-bit"

    def parts(self, kv_bits: int) -> list[SegmentPart]:
        """The arrays of a saved segment: keys of every layer, then values."""
        float32 = np.dtype(np.float32)
        return [SegmentPart(layer.kv_heads, layer.head_dim, float32) for layer in self.plan.model.layers] * 2

    def _start(self, storage: KVCacheConfig) -> NumpyState:
        return NumpyState(self, storage)

    def _forward(self, states: Sequence[NumpyState], chunks: Sequence[Chunk]) -> list[Logits]:
        with vendor_errors("numpy"):
            return [self._append(state, chunk) for state, chunk in zip(states, chunks, strict=True)]

    def _append(self, state: NumpyState, chunk: Chunk) -> Logits:
        step = 1 if self._exact else len(chunk.tokens)
        hidden, logits = [], []
        for start in range(0, len(chunk.tokens), step):
            tokens = chunk.tokens[start : start + step]
            hidden.append(self._decoder.run(tokens, state.length, state.keys, state.values))
            state.held.append(len(tokens), all_layers=True)
        last = np.concatenate(hidden)[len(chunk.tokens) - chunk.num_logits :]
        for start in range(0, len(last), step):
            logits.append(self._decoder.logits(last[start : start + step]))
        return np.concatenate(logits) if logits else self._no_logits()

    def _free(self, state: NumpyState) -> None:
        state.keys, state.values = [], []

    def _close(self) -> None:
        del self._decoder
