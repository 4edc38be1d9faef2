"""The engine of encoders: hidden states of whole texts, or logits of pairs; texts of similar length in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import Eviction, KVCacheConfig
from edgekit.contracts.plan import Plan
from edgekit.enginekit.base import EngineBase, LoadedAdapter
from edgekit.enginekit.kv_segment import SegmentPart
from edgekit.enginekit.state import StateBase
from edgekit.errors import InvalidInput, Unsupported, vendor_errors
from edgekit_onnx.capabilities import capabilities
from edgekit_onnx.layout import MASKED, window_masks
from edgekit_onnx.loading import load
from edgekit_onnx.sessions import PROVIDERS, CallOptions

if TYPE_CHECKING:
    from edgekit.contracts.engine import Logits

TEXTS_TOGETHER = 256  # most texts of a step; the plan limits its tokens
_LEAST_FILLED = 0.75  # least share of the longest text: shorter texts get another call, to avoid padding


class EncoderState(StateBase):
    """One text. It has no keys and values."""

    def _evict(self, spans: Sequence[Eviction]) -> NoReturn:
        raise Unsupported("an encoder caches nothing; there is nothing to evict")

    def _read(self, start: int, stop: int) -> list[NDArray[Any]]:
        return []

    def _write(self, arrays: Sequence[NDArray[Any]]) -> None:
        pass


class OnnxEncoder(EngineBase[EncoderState, LoadedAdapter]):
    """An encoder's artifact, opened with onnxruntime."""

    target = "onnx"
    runs_adapters = False

    def __init__(self, plan: Plan, files: Path) -> None:
        super().__init__(plan)
        loaded = load(plan, files, PROVIDERS[plan.backend])
        self._session, self._model_key = loaded.head, loaded.key
        self._is_bert, self._masks = plan.model.is_bert, window_masks(plan.model)
        self._options, self._classifies = CallOptions("cpu"), bool(plan.model.encoder and plan.model.encoder.classifier)
        self.notes = (loaded.note,) if loaded.note else ()
        self.capabilities = capabilities(plan.model, plan.recipe, plan.backend).narrowed(
            plan, max_states=TEXTS_TOGETHER, kv_bits=(plan.storage.kv_bits,), copied_share=loaded.copied_share
        )

    @property
    def model_key(self) -> str:
        return self._model_key

    def form(self, kv_bits: int) -> str:
        return "none"

    def parts(self, kv_bits: int) -> list[SegmentPart]:
        return []

    def _start(self, storage: KVCacheConfig) -> EncoderState:
        return EncoderState(self, storage)

    def _forward(self, states: Sequence[EncoderState], chunks: Sequence[Chunk]) -> list[Logits]:
        for state, chunk in zip(states, chunks, strict=True):
            if not (chunk.hidden or (self._classifies and chunk.num_logits == 1)):
                raise Unsupported("an encoder has no logits of tokens; ask for hidden states")
            if state.position:
                raise InvalidInput("an encoder reads a text whole; feed it in one chunk to a state of its own")
        rows: list[Logits] = [self._no_logits() for _ in chunks]
        for batch in self._batches(chunks):
            results = self._run([chunks[index] for index in batch])
            for row, index in enumerate(batch):
                chunk, count = chunks[index], len(chunks[index].tokens)
                if chunk.hidden:
                    rows[index] = results["hidden"][row, count - chunk.num_logits : count].copy()
                else:
                    rows[index] = results["scores"][row : row + 1]
                states[index].held.append(count, all_layers=True)
        return rows

    def _batches(self, chunks: Sequence[Chunk]) -> Iterator[list[int]]:
        """Yield indices of chunks for one call: of similar length, and within the planned tokens including padding."""
        batch: list[int] = []
        for index in sorted(range(len(chunks)), key=lambda index: -len(chunks[index].tokens)):
            longest = len(chunks[batch[0]].tokens) if batch else 0
            is_short = len(chunks[index].tokens) < _LEAST_FILLED * longest
            if batch and (is_short or (len(batch) + 1) * longest > self.capabilities.max_chunk_tokens):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _run(self, chunks: Sequence[Chunk]) -> dict[str, NDArray[np.float32]]:
        """Return hidden states [texts, tokens, width], and scores [texts, 1]; texts are padded to the longest."""
        lengths = np.array([len(chunk.tokens) for chunk in chunks], np.int32)
        ids = np.zeros((len(chunks), lengths.max()), np.int64)
        types = np.zeros_like(ids)
        for row, chunk in enumerate(chunks):
            ids[row, : len(chunk.tokens)] = chunk.tokens
            types[row, chunk.second or len(chunk.tokens) :] = 1
        places = np.arange(ids.shape[1])
        fed: dict[str, NDArray[Any]] = {"input_ids": ids, "lengths": lengths}
        if self._is_bert:
            fed["positions"] = places
        if self._classifies:
            fed["types"] = types
        for name, window in self._masks.items():
            is_far = np.abs(places[:, None] - places[None, :]) >= window
            fed[name] = np.where(is_far, np.float32(MASKED), np.float32(0.0))[None, None]
        asked = {"hidden": any(chunk.hidden for chunk in chunks), "scores": not all(chunk.hidden for chunk in chunks)}
        names = [name for name, is_asked in asked.items() if is_asked]
        with vendor_errors("onnx"):
            found: list[NDArray[np.float32]] = self._session.run(names, fed, self._options.giving_back)
        return dict(zip(names, found, strict=True))

    def interrupt(self) -> None:
        """End a running call before its next operator."""
        super().interrupt()
        self._options.terminate()

    def _close(self) -> None:
        self._session = None
