"""The base class of engines: checks, refusals and bookkeeping, the same on every target. States: see `state`.

A target's engine describes a state's storage (`form`, `parts`), starts states and runs checked chunks; a target's
state moves keys and values. Both may assume that arguments are valid and nothing is closed.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from edgekit.contracts.capabilities import Capabilities
from edgekit.contracts.engine import Chunk, Segment
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.contracts.plan import Plan
from edgekit.contracts.recurrent import checkpoint_tokens, most_checkpoints, recurrent_bytes, recurrent_shapes
from edgekit.enginekit.bookkeeping import check_chunk, check_storage
from edgekit.enginekit.kv_segment import SegmentPart, read_key_values
from edgekit.enginekit.recurrent import forward_in_pieces
from edgekit.enginekit.state import StateBase
from edgekit.errors import DamagedArtifact, InvalidInput, TargetFailed, UnknownName, Unsupported, quote_short
from edgekit.model.lora import LoraAdapter, read_adapter

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.contracts.engine import Logits


class LoadedAdapter(Protocol):
    """A LoRA adapter in an engine's own format."""

    @property
    def sha256(self) -> str: ...
    @property
    def bytes(self) -> int: ...


AnyState = TypeVar("AnyState", bound=StateBase)
AnyAdapter = TypeVar("AnyAdapter", bound=LoadedAdapter)


class EngineBase(ABC, Generic[AnyState, AnyAdapter]):
    """One opened artifact. A subclass sets `capabilities` and `notes` before its constructor returns."""

    target: ClassVar[str]  # the target's name in messages
    runs_adapters: ClassVar[bool] = True  # False: adapters must be merged into the weights before quantising
    capabilities: Capabilities
    notes: tuple[str, ...] = ()

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.checkpoint_tokens = checkpoint_tokens(plan.model)
        self.states: list[AnyState] = []
        self.adapters: dict[str, AnyAdapter] = {}
        self._is_closed = self._is_interrupted = False

    def start(self, storage: KVCacheConfig) -> AnyState:
        self._check_open()
        self._check_storage(storage)
        if len(self.states) >= self.capabilities.max_states:
            raise InvalidInput(
                f"all {self.capabilities.max_states} states are in use; close one, or export with more sequences"
            )
        self._before_start(storage)
        return self._admit(storage)

    def state_bytes(self, storage: KVCacheConfig) -> int:
        self._check_storage(storage)
        by_position = sum(part.token_bytes for part in self.parts(storage.kv_bits)) * self._slots(storage)
        return by_position + recurrent_bytes(self.plan.model, storage.capacity_tokens)

    def forward(self, chunks: Sequence[Chunk]) -> list[Logits]:
        try:
            self._check_open()
            states = [self._state_of(chunk) for chunk in chunks]
            if len({id(state) for state in states}) < len(states):
                raise InvalidInput("a state occurs twice in one forward; feed its tokens in one chunk")
            if self.checkpoint_tokens is None:
                return self._forward(states, chunks)
            return self._forward_in_pieces(states, chunks)
        except BaseException:
            for chunk in chunks:
                chunk.state.close()
            raise

    def settle(self, state: AnyState) -> None:
        """Recompute the tokens that the recurrent part of a rewound or restored state lacks."""
        if state.num_replayed:
            try:
                self._forward_in_pieces([state], [Chunk(state, (), 0)])
            except BaseException:
                state.close()
                raise

    def embedded(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the embeddings of tokens, for states."""
        self._check_open()
        if not self.capabilities.kv_layers:
            raise Unsupported(f"{self.target}: this engine hands out no embeddings")
        if not tokens or min(tokens) < 0 or max(tokens) >= self.capabilities.vocabulary:
            raise InvalidInput(f"embeddings of {len(tokens)} tokens, of a vocabulary of {self.capabilities.vocabulary}")
        return self._embedded(tokens)

    def read_segment(self, path: Path) -> Segment:
        forms = {self.form(bits): self.segment_parts(bits) for bits in self.capabilities.kv_bits}
        models = [self.key_of(name) for name in (None, *sorted(self.adapters))]
        capacity, shapes = self.plan.storage.capacity_tokens, recurrent_shapes(self.plan.model)
        most = 0 if self.checkpoint_tokens is None else most_checkpoints(self.checkpoint_tokens, capacity)
        segment = read_key_values(path, models, forms, capacity, recurrent=shapes, most_checkpoints=most)
        tokens, vocabulary = segment.arrays[0], self.capabilities.vocabulary
        if shapes and tokens.size and not 0 <= tokens.min() <= tokens.max() < vocabulary:
            raise DamagedArtifact(f"{path}: holds tokens outside the vocabulary of {vocabulary}; remove it")
        return segment

    def segment_parts(self, kv_bits: int) -> list[SegmentPart]:
        """The arrays of a segment, in order; with recurrent layers, the first one holds the tokens."""
        tokens = [SegmentPart(1, 1, np.dtype(np.int32))] if self.checkpoint_tokens is not None else []
        return tokens + self.parts(kv_bits)

    def load_adapter(self, name: str, files: Path) -> int:
        self._check_open()
        if not self.runs_adapters:
            raise Unsupported(
                f"{self.target}: adapter {quote_short(name)}: merge it into the weights before quantising"
            )
        if not self.plan.adapter_rank:
            raise Unsupported(
                f"{self.target}: adapter {quote_short(name)}: this artifact was exported without room for adapters; "
                "export it again with --adapter-rank (e.g. 16)"
            )
        if by := self.plan.rescaled_by:
            raise Unsupported(
                f"adapter {quote_short(name)}: {by} scaled the inputs that adapters read; export the model again with "
                f"recipe {self.plan.recipe.plain_name} and --method gptq or rtn"
            )
        if name in self.adapters:
            raise InvalidInput(f"adapter {quote_short(name)} is loaded already; drop it first")
        adapter = self._load_adapter(name, read_adapter(files, self.plan.model, most_rank=self.plan.adapter_rank))
        self.adapters[name] = adapter
        try:
            self._check_adapter(name)
        except BaseException:
            self.drop_adapter(name)
            raise
        return adapter.bytes

    def drop_adapter(self, name: str) -> None:
        self.find_adapter(name)
        if any(state.storage.adapter == name for state in self.states):
            raise InvalidInput(f"adapter {quote_short(name)} is in use; close its states first")
        del self.adapters[name]
        self._drop_adapter(name)

    def find_adapter(self, name: str | None) -> AnyAdapter | None:
        """Return the loaded adapter `name`; None for None. Raises UnknownName."""
        if name is None:
            return None
        if name not in self.adapters:
            raise UnknownName("adapter", name, self.adapters)
        return self.adapters[name]

    def key_of(self, adapter: str | None) -> str:
        """Return the key of saved keys and values: a hash of model and adapter."""
        loaded = self.find_adapter(adapter)
        if loaded is None:
            return self.model_key
        return hashlib.sha256(f"{self.model_key} {loaded.sha256}".encode()).hexdigest()

    def use_threads(self, count: int) -> None:
        self._check_open()
        most = self.capabilities.threads
        if most is None:
            raise Unsupported(f"{self.target}: the number of threads is fixed when an artifact is opened")
        if not 1 <= count <= most:
            raise InvalidInput(f"threads: must be 1 to {most}, found {count}")
        self._use_threads(count)

    def interrupt(self) -> None:
        """Refuse all calls from now on. A subclass whose library can end a running call tells it too."""
        self._is_interrupted = True

    def remove(self, state: AnyState) -> None:
        """Forget a closed state and free its memory."""
        self.states.remove(state)
        self._free(state)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            for state in list(self.states):
                state.close()
            self.adapters.clear()
            self._close()

    @property
    @abstractmethod
    def model_key(self) -> str:
        """A hash that identifies the artifact."""

    @abstractmethod
    def form(self, kv_bits: int) -> str:
        """The name of the KV format, as written in segments."""

    @abstractmethod
    def parts(self, kv_bits: int) -> list[SegmentPart]:
        """The arrays of a state's keys and values, in order."""

    @abstractmethod
    def _start(self, storage: KVCacheConfig) -> AnyState:
        """Make an empty state; the caller has checked that there is room."""

    @abstractmethod
    def _forward(self, states: Sequence[AnyState], chunks: Sequence[Chunk]) -> list[Logits]:
        """Run chunks, one per state, and count each state's tokens with `held.append`.

        Afterwards, a recurrent part must include exactly the first `state.recurrent.kept` tokens of its chunk.
        """

    @abstractmethod
    def _close(self) -> None:
        """Free the engine; its states are closed already."""

    def _before_start(self, storage: KVCacheConfig) -> None:
        """Refuse a state for a reason of this target, after the checks of all targets."""

    def _embedded(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the embeddings of known tokens; only for engines with `kv_layers`."""
        raise NotImplementedError(f"{type(self).__name__} declares kv_layers but hands out no embeddings")

    def _free(self, state: AnyState) -> None:
        """Free the memory of a closed state."""

    def _load_adapter(self, name: str, adapter: LoraAdapter) -> AnyAdapter:
        """Convert a checked adapter to the engine's format; only for engines with `runs_adapters`."""
        raise NotImplementedError(f"{type(self).__name__} declares runs_adapters but cannot load one")

    def _check_adapter(self, name: str) -> None:
        """Prepare for states with a loaded adapter; raise if the engine's guarantees do not hold with it."""

    def _drop_adapter(self, name: str) -> None:
        """Free an adapter that no state uses."""

    def _use_threads(self, count: int) -> None:
        """Compute with that many threads from now on; only for engines with `capabilities.threads`."""
        raise NotImplementedError(f"{type(self).__name__} declares threads but cannot change their number")

    def _slots(self, storage: KVCacheConfig) -> int:
        """Return the number of tokens for which a state reserves memory."""
        return storage.capacity_tokens

    def _admit(self, storage: KVCacheConfig) -> AnyState:
        state = self._start(storage)
        if self.checkpoint_tokens is not None:
            state.start_recurrent(self.checkpoint_tokens, recurrent_shapes(self.plan.model))
        self.states.append(state)
        return state

    def _forward_in_pieces(self, states: Sequence[AnyState], chunks: Sequence[Chunk]) -> list[Logits]:
        def forward(indices: list[int], calls: list[Chunk]) -> list[Logits]:
            self._check_open()
            return self._forward([states[index] for index in indices], calls)

        return forward_in_pieces(states, chunks, self.capabilities.max_chunk_tokens, forward)

    def _no_logits(self) -> Logits:
        return np.empty((0, self.capabilities.vocabulary), np.float32)

    def _state_of(self, chunk: Chunk) -> AnyState:
        state = next((state for state in self.states if state is chunk.state), None)
        if state is None:
            raise InvalidInput("the state is closed, or belongs to another engine")
        check_chunk(chunk, state.held, self.capabilities)
        return state

    def _check_storage(self, storage: KVCacheConfig) -> None:
        check_storage(storage, self.capabilities, self.plan.storage, self.target)
        self.find_adapter(storage.adapter)

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidInput("the engine is closed")
        if self._is_interrupted:
            raise TargetFailed(f"{self.target}: the call was interrupted; open the artifact again")
