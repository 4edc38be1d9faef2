"""The engine of encoders: computes the hidden states of whole texts, texts of similar length in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgekit.contracts.engine import Abilities, Chunk
from edgekit.contracts.kv_policy import Eviction, KVCacheConfig
from edgekit.contracts.plan import Plan
from edgekit.enginekit.base import EngineBase, LoadedAdapter
from edgekit.enginekit.kv_segment import SegmentPart
from edgekit.enginekit.state import StateBase
from edgekit.errors import InvalidInput, Unsupported, vendor_errors
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
        self._options = CallOptions("cpu")
        self.notes = (loaded.note,) if loaded.note else ()
        self.abilities = Abilities(
            vocabulary=plan.model.vocab_size,
            max_states=TEXTS_TOGETHER,
            max_chunk_tokens=plan.chunk_tokens,
            max_rewind=0,
            kv_bits=(plan.storage.kv_bits,),
            can_evict=False,
            can_save=False,
            hidden_size=plan.model.hidden_size,
            generates=False,
            copied_share=loaded.copied_share,
            exact="never",
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
            if not chunk.hidden:
                raise Unsupported("an encoder has no logits; ask for hidden states")
            if state.position:
                raise InvalidInput("an encoder reads a text whole; feed it in one chunk to a state of its own")
        rows: list[Logits] = [self._no_logits() for _ in chunks]
        for batch in self._batches(chunks):
            hidden = self._run([chunks[index].tokens for index in batch])
            for row, index in enumerate(batch):
                count = len(chunks[index].tokens)
                rows[index] = hidden[row, count - chunks[index].num_logits : count].copy()
                states[index].held.append(count, all_layers=True)
        return rows

    def _batches(self, chunks: Sequence[Chunk]) -> Iterator[list[int]]:
        """Yield indices of chunks for one call: of similar length, and within the planned tokens including padding."""
        batch: list[int] = []
        for index in sorted(range(len(chunks)), key=lambda index: -len(chunks[index].tokens)):
            longest = len(chunks[batch[0]].tokens) if batch else 0
            is_short = len(chunks[index].tokens) < _LEAST_FILLED * longest
            if batch and (is_short or (len(batch) + 1) * longest > self.abilities.max_chunk_tokens):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _run(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Return hidden states [texts, tokens, width]; texts are padded to the longest."""
        lengths = np.array([len(text) for text in texts], np.int32)
        ids = np.zeros((len(texts), lengths.max()), np.int64)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
        fed = {"input_ids": ids, "positions": np.arange(ids.shape[1]), "lengths": lengths}
        with vendor_errors("onnx"):
            hidden: NDArray[np.float32] = self._session.run(["hidden"], fed, self._options.giving_back)[0]
        return hidden

    def interrupt(self) -> None:
        """End a running call before its next operator."""
        super().interrupt()
        self._options.terminate()

    def _close(self) -> None:
        self._session = None
