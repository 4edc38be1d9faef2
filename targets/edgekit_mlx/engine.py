"""The engine: states of their own arrays, and one forward over all tokens of a call at once.

Knows nothing of sampling, speculation or windows: it appends tokens, and forgets them when it is told to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from edgekit.artifact import MANIFEST
from edgekit.cache import Storage
from edgekit.errors import InvalidInput, clip
from edgekit.files import file_sha256
from edgekit.holding import check_chunk, check_storage
from edgekit.interfaces import Abilities, Chunk, Segment
from edgekit.plan import Plan
from edgekit.segments import Part, read_key_values
from edgekit_mlx.adapters import Adapters
from edgekit_mlx.cache import FLOATS, group_of, layout
from edgekit_mlx.decoder import Decoder, Run
from edgekit_mlx.layout import WEIGHTS
from edgekit_mlx.memory import prepare
from edgekit_mlx.positions import Positions
from edgekit_mlx.state import MlxState
from edgekit_mlx.weights import Weights
from edgekit_mlx.worker import Worker

if TYPE_CHECKING:
    from edgekit.interfaces import Logits


# Scores of attention may take this share of what the plan gives to a chunk; softmax holds them about three times.
_SCORE_SHARE = 16
_LEAST_SCORE_BYTES = 1 << 18


class MlxEngine:
    """One artifact, opened. All that MLX does happens on the engine's own thread."""

    def __init__(self, plan: Plan, files: Path, *, exact: bool = False) -> None:
        self.plan, self._files = plan, files
        self.states: list[MlxState] = []
        self._adapters = Adapters(plan)
        self.worker = Worker()
        self.positions = Positions(plan.model, plan.context)
        self.score_bytes = max(_LEAST_SCORE_BYTES, plan.estimate.activation_bytes // _SCORE_SHARE)
        try:
            on_gpu = self.worker.run(lambda: self._open(plan, files))
        except BaseException:
            self.worker.close()
            raise
        # One row at a time runs the same kernels for the same numbers, whatever came with them. CPUs do so anyway.
        self._one_by_one = exact and on_gpu
        self.abilities = Abilities(
            vocabulary=plan.model.vocab_size,
            max_states=plan.sequences,
            max_chunk_tokens=plan.chunk_tokens,
            kv_bits=kv_bits_of(plan, on_gpu=on_gpu),
            exits=tuple(range(1, len(plan.model.layers))),
            adapters=plan.adapter_rank > 0,
            exact="on_request" if on_gpu else "always",
        )

    def _open(self, plan: Plan, files: Path) -> bool:
        prepared = prepare(plan)
        self.notes = prepared.notes
        weights = Weights(plan.model, files, numbers=None if prepared.on_gpu else mx.float32)
        self._numbers = weights.numbers
        self._decoder = Decoder(plan.model, weights, self.positions)
        return prepared.on_gpu

    @cached_property
    def model_key(self) -> str:
        """The same for the same artifact: what its saved segments are known by."""
        manifest = self._files / MANIFEST
        if manifest.exists():
            return hashlib.sha256(manifest.read_bytes()).hexdigest()
        return file_sha256(self._files / WEIGHTS)

    def start(self, storage: Storage) -> MlxState:
        check_storage(storage, self.abilities, self.plan.storage, "mlx")
        self._adapters.find(storage.adapter)
        if len(self.states) >= self.abilities.max_states:
            raise InvalidInput(
                f"all {self.abilities.max_states} states are in use; close one, or export with more sequences"
            )
        state = self.worker.run(lambda: MlxState(self, storage))
        self.states.append(state)
        return state

    def state_bytes(self, storage: Storage) -> int:
        check_storage(storage, self.abilities, self.plan.storage, "mlx")
        self._adapters.find(storage.adapter)
        return sum(part.token_bytes for part in self._parts(storage.kv_bits)) * storage.capacity_tokens

    def forward(self, chunks: Sequence[Chunk]) -> list[Logits]:
        try:
            states = [self._check(chunk) for chunk in chunks]
            if len({id(state) for state in states}) < len(states):
                raise InvalidInput("a state stands twice in one forward; feed its tokens in one chunk")
            found: list[Logits] = [np.empty((0, self.abilities.vocabulary), np.float32) for _ in chunks]
            for together in self._batches(chunks):
                batch = [(states[index], chunks[index]) for index in together]
                for index, logits in zip(together, self.worker.run(lambda: self._run(batch)), strict=True):  # noqa: B023
                    found[index] = logits
        except BaseException:
            for chunk in chunks:
                chunk.state.close()
            raise
        return found

    def read_segment(self, path: Path) -> Segment:
        forms = {f"{bits}-bit": self._parts(bits) for bits in self.abilities.kv_bits}
        models = [self.key_of(name) for name in (None, *self._adapters.names)]
        return read_key_values(path, models, forms, self.plan.storage.capacity_tokens)

    def load_adapter(self, name: str, files: Path) -> int:
        return self.worker.run(lambda: self._adapters.load(name, files, self._numbers))

    def drop_adapter(self, name: str) -> None:
        self._adapters.find(name)
        if any(state.storage.adapter == name for state in self.states):
            raise InvalidInput(f"adapter {clip(name)} is in use; close its states first")
        self.worker.run(lambda: self._adapters.drop(name))

    def key_of(self, adapter: str | None) -> str:
        """What saved keys and values are known by: the model's bytes and the adapter's."""
        found = self._adapters.find(adapter)
        if found is None:
            return self.model_key
        return hashlib.sha256(f"{self.model_key} {found.sha256}".encode()).hexdigest()

    def close(self) -> None:
        for state in list(self.states):
            state.close()
        if hasattr(self, "_decoder"):
            del self._decoder
            self.worker.run(mx.clear_cache)
        self.worker.close()

    def _parts(self, bits: int) -> list[Part]:
        """The arrays of a state, in order."""
        found = []
        for layer in self.plan.model.layers:
            for width, dtype in layout(layer, bits):
                found.append(Part(layer.kv_heads, width, _NUMPY[dtype]))
        return found

    def _check(self, chunk: Chunk) -> MlxState:
        state = chunk.state
        if not isinstance(state, MlxState) or not state.held.is_open or state not in self.states:
            raise InvalidInput("the state is closed, or of another engine")
        check_chunk(chunk, state.held, self.abilities)
        return state

    def _batches(self, chunks: Sequence[Chunk]) -> Iterator[list[int]]:
        """Chunks that run as one: the same last layer, the same adapter, up to the planned number of tokens."""

        def kind(chunk: Chunk) -> tuple[int | None, str | None]:
            assert isinstance(chunk.state, MlxState)
            return chunk.exit, chunk.state.storage.adapter

        for wanted in dict.fromkeys(kind(chunk) for chunk in chunks):
            together: list[int] = []
            tokens = 0
            for index, chunk in enumerate(chunks):
                if kind(chunk) != wanted:
                    continue
                if together and (self._one_by_one or tokens + len(chunk.tokens) > self.plan.chunk_tokens):
                    yield together
                    together, tokens = [], 0
                together.append(index)
                tokens += len(chunk.tokens)
            yield together

    def _run(self, batch: Sequence[tuple[MlxState, Chunk]]) -> list[Logits]:
        if self._one_by_one and len(batch[0][1].tokens) > 1:
            return [self._token_by_token(*batch[0])]
        leave = batch[0][1].exit
        runs = [Run(state.caches, state.length, state.turned_from, len(chunk.tokens)) for state, chunk in batch]
        ids = [token for _, chunk in batch for token in chunk.tokens]
        adapter = self._adapters.find(batch[0][0].storage.adapter)
        added = adapter.modules if adapter else None
        hidden = self._decoder.body(ids, runs, leave or len(self.plan.model.layers), added)
        wanted: list[int] = []
        end = 0
        for _, chunk in batch:
            end += len(chunk.tokens)
            wanted += range(end - chunk.rows, end)
        logits = self._decoder.head(hidden[mx.array(wanted)] if len(wanted) < end else hidden) if wanted else None
        mx.eval(logits, [state.arrays() for state, _ in batch])
        for state, chunk in batch:
            state.held.fed(len(chunk.tokens), all_layers=leave is None)
        if logits is None:
            return [np.empty((0, self.abilities.vocabulary), np.float32) for _ in batch]
        rows = np.array(logits)
        return np.split(rows, np.cumsum([chunk.rows for _, chunk in batch])[:-1])

    def _token_by_token(self, state: MlxState, chunk: Chunk) -> Logits:
        first = len(chunk.tokens) - chunk.rows
        found = [
            self._run([(state, Chunk(state, [token], int(place >= first), chunk.exit))])[0]
            for place, token in enumerate(chunk.tokens)
        ]
        return np.concatenate(found)


def kv_bits_of(plan: Plan, *, on_gpu: bool) -> tuple[int, ...]:
    """Widths that keys and values can have here, best first; a group must divide every head to quantise them."""
    floats = [bits for bits in FLOATS if not on_gpu or bits == 16]
    can_quantise = all(group_of(layer.head_dim) for layer in plan.model.layers)
    return (*floats, *((8, 4) if can_quantise else ()))


_NUMPY: dict[mx.Dtype, np.dtype[Any]] = {
    mx.float32: np.dtype("<f4"),
    mx.float16: np.dtype("<f2"),
    mx.uint32: np.dtype("<u4"),
}
