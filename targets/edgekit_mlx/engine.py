"""The engine: each state has its own arrays, and one forward computes all tokens of a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from edgekit.common.files import file_sha256
from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.contracts.manifest import MANIFEST
from edgekit.contracts.plan import Plan
from edgekit.enginekit.base import EngineBase
from edgekit.enginekit.kv_segment import SegmentPart
from edgekit.model.lora import LoraAdapter
from edgekit_mlx.adapters import MlxAdapter, convert_adapter
from edgekit_mlx.capabilities import capabilities
from edgekit_mlx.decoder import MlxDecoder, Run
from edgekit_mlx.kv_cache import layout
from edgekit_mlx.layout import WEIGHTS
from edgekit_mlx.preparation import prepare
from edgekit_mlx.rope import RopeTables
from edgekit_mlx.state import MlxState
from edgekit_mlx.weights import Weights
from edgekit_mlx.worker import MlxThread

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.contracts.engine import Features, Logits


# Attention scores may take one part in this many of the planned activations; softmax stores them about three times.
_SCORE_SHARE = 16
_LEAST_SCORE_BYTES = 1 << 18


class MlxEngine(EngineBase[MlxState, MlxAdapter]):
    """One artifact, opened with MLX. Every MLX call runs on the engine's own thread."""

    target = "mlx"

    def __init__(self, plan: Plan, files: Path, *, exact: bool = False) -> None:
        super().__init__(plan)
        self._files = files
        self._worker = MlxThread()
        self._ropes = RopeTables(plan.model, plan.context)
        self._score_bytes = max(_LEAST_SCORE_BYTES, plan.estimate.activation_bytes // _SCORE_SHARE)
        try:
            on_gpu = self._worker.run(self._open)
        except BaseException:
            self._worker.close()
            raise
        # A GPU's kernels depend on the number of rows, so exact mode feeds one row at a time. A CPU's do not.
        self._one_by_one = exact and on_gpu
        able = capabilities(plan.model, on_metal=on_gpu)
        # Every layer can be the last one.
        exits = tuple(range(1, len(plan.model.layers))) if "exits" in able.features else ()
        self.capabilities = able.narrowed(plan, exits=exits)

    @cached_property
    def model_key(self) -> str:
        manifest = self._files / MANIFEST
        return file_sha256(manifest if manifest.exists() else self._files / WEIGHTS)

    def form(self, kv_bits: int) -> str:
        return f"{kv_bits}-bit"

    def parts(self, kv_bits: int) -> list[SegmentPart]:
        return [
            SegmentPart(layer.kv_heads, width, _NUMPY[dtype])
            for layer in self.plan.model.layers
            if layer.stores_kv
            for width, dtype in layout(layer, kv_bits)
        ]

    def _open(self) -> bool:
        """Load the weights; return True if the GPU computes."""
        prepared = prepare(self.plan)
        self.notes = prepared.notes
        weights = Weights(self.plan.model, self._files, numbers=None if prepared.on_gpu else mx.float32)
        self._numbers = weights.numbers
        self._decoder = MlxDecoder(self.plan.model, weights, self._ropes)
        return prepared.on_gpu

    def _start(self, storage: KVCacheConfig) -> MlxState:
        model = self.plan.model
        return self._worker.run(lambda: MlxState(self, storage, model, self._ropes, self._worker, self._score_bytes))

    def _forward(self, states: Sequence[MlxState], chunks: Sequence[Chunk]) -> list[Logits]:
        logits = [self._no_logits() for _ in chunks]
        for indices in self._batches(chunks):
            batch = [(states[index], chunks[index]) for index in indices]
            for index, rows in zip(indices, self._worker.run(lambda: self._run(batch)), strict=True):  # noqa: B023
                logits[index] = rows
        return logits

    def _embedded(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        return self._worker.run(lambda: np.array(self._decoder.embedded(tokens).astype(mx.float32)))

    def _load_adapter(self, name: str, adapter: LoraAdapter) -> MlxAdapter:
        return self._worker.run(lambda: convert_adapter(self.plan.model, adapter, self._numbers))

    def _close(self) -> None:
        del self._decoder
        self._worker.run(mx.clear_cache)
        self._worker.close()

    def _batches(self, chunks: Sequence[Chunk]) -> Iterator[list[int]]:
        """Yield indices of chunks that run together: same exit layer and adapter, within the planned chunk tokens."""

        def kind_of(chunk: Chunk) -> tuple[int | None, str | None]:
            assert isinstance(chunk.state, MlxState)
            return chunk.exit_layer, chunk.state.storage.adapter

        for kind in dict.fromkeys(kind_of(chunk) for chunk in chunks):
            batch: list[int] = []
            tokens = 0
            for index, chunk in enumerate(chunks):
                if kind_of(chunk) != kind:
                    continue
                if batch and (self._one_by_one or tokens + len(chunk.tokens) > self.plan.chunk_tokens):
                    yield batch
                    batch, tokens = [], 0
                batch.append(index)
                tokens += len(chunk.tokens)
            yield batch

    def _run(self, batch: Sequence[tuple[MlxState, Chunk]], kept: int | None = None) -> list[Logits]:
        """Run chunks of different states. `kept`: of each chunk's tokens in recurrent parts; None: as states say."""
        if self._one_by_one and len(batch[0][1].tokens) > 1:
            return [self._token_by_token(*batch[0])]
        exit_layer = batch[0][1].exit_layer
        last = exit_layer or len(self.plan.model.layers)
        asks = any(chunk.features is not None for _, chunk in batch)
        runs = [
            Run(
                state.caches, state.length, state.next_position, len(chunk.tokens), state.carried,
                state.kept if kept is None else kept,
            )
            for state, chunk in batch
        ]  # fmt: skip
        ids = [token for _, chunk in batch for token in chunk.tokens]
        adapter = self.find_adapter(batch[0][0].storage.adapter)
        found = self._decoder.body(
            ids, runs, {last, *(self.capabilities.feature_layers if asks else ())}, adapter.modules if adapter else None
        )
        hidden = found[last]
        rows: list[int] = []  # rows of hidden states whose logits are requested
        asked: list[tuple[Features, mx.array]] = []
        end = 0
        for _, chunk in batch:
            start, end = end, end + len(chunk.tokens)
            rows += range(end - chunk.num_logits, end)
            if chunk.features is not None:
                parts = [found[layer][start:end].astype(mx.float32) for layer in self.capabilities.feature_layers]
                asked.append((chunk.features, mx.concatenate(parts, axis=1)))
        logits = self._decoder.head(hidden[mx.array(rows)] if len(rows) < end else hidden) if rows else None
        mx.eval(logits, [values for _, values in asked], [(state.arrays(), state.carried) for state, _ in batch])
        for features, values in asked:
            features[:] = np.array(values)
        for state, chunk in batch:
            state.held.append(len(chunk.tokens), all_layers=exit_layer is None)
        if logits is None:
            return [self._no_logits() for _ in batch]
        return np.split(np.array(logits), np.cumsum([chunk.num_logits for _, chunk in batch])[:-1])

    def _token_by_token(self, state: MlxState, chunk: Chunk) -> Logits:
        first, logits, carried = len(chunk.tokens) - chunk.num_logits, [], state.carried
        for index, token in enumerate(chunk.tokens):
            if index == state.kept:
                carried = dict(state.carried)
            features = None if chunk.features is None else chunk.features[index : index + 1]
            one = Chunk(state, [token], int(index >= first), chunk.exit_layer, features=features)
            logits += self._run([(state, one)], kept=1)
        state.carried = carried
        return np.concatenate(logits)


_NUMPY: dict[mx.Dtype, np.dtype[Any]] = {
    mx.float32: np.dtype("<f4"),
    mx.float16: np.dtype("<f2"),
    mx.uint32: np.dtype("<u4"),
}
