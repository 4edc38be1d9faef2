"""The contracts between the scheduler and the engines of targets. Importing this module loads no vendor library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from edgekit.contracts.capabilities import Capabilities
from edgekit.contracts.kv_policy import Eviction, KVCacheConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    # [rows, vocabulary], hidden states [rows, hidden_size] for a chunk with `hidden`, or a classifier's logit [1, 1].
    Logits = NDArray[np.float32]
    Features = NDArray[np.float32]  # [tokens, layers × width]
    Floats = NDArray[np.float32]


class CachedKV(NamedTuple):
    """Keys and values [kv_head, token, head_dim] of cached tokens in one layer, in float32."""

    keys: Floats
    values: Floats


class Segment(Protocol):
    """A copy of the keys and values of consecutive tokens, outside a state.

    Of a model with recurrent layers it also has the tokens, and the checkpoints between them. A segment saved after
    evictions can only be restored as a whole, into an empty state.
    """

    @property
    def bytes(self) -> int: ...
    @property
    def tokens(self) -> int: ...

    def head(self, count: int) -> Segment:
        """Return the first `count` tokens in the same memory, to be restored immediately."""

    def split(self, count: int) -> tuple[Segment, Segment]:
        """Return copies of the first `count` tokens and of the rest."""

    def write(self, path: Path) -> None: ...


class State(Protocol):
    """The cache of one sequence in an engine: keys and values by position, and a recurrent part of fixed size.

    Only hybrid models have a recurrent part. It cannot be truncated like keys and values, so a state keeps checkpoints
    of it, every `capabilities.checkpoint_tokens`. A rewind or restore loads the nearest earlier checkpoint, and the
    next `forward` recomputes the tokens since then.
    """

    @property
    def position(self) -> int:
        """Tokens processed so far, evicted ones included."""

    @property
    def length(self) -> int:
        """Tokens cached now."""

    @property
    def next_position(self) -> int:
        """The rotary position of the next token, among the cached keys as they are rotated now."""

    @property
    def num_replayed(self) -> int:
        """Cached tokens that the next `forward` recomputes for the recurrent part; 0 without one."""

    @property
    def bytes(self) -> int: ...

    def rewind(self, count: int) -> None:
        """Drop the last `count` tokens, across calls of `forward`; at most `capabilities.max_rewind`.

        A state with a recurrent part cannot rewind past an eviction.
        """

    def evict(self, start: int, stop: int) -> None:
        """Drop cached tokens and shift the positions of later ones to close the gap. The recurrent part stays."""

    def evict_spans(self, spans: Sequence[Eviction]) -> None:
        """Drop several spans, in order and apart from each other, as `evict` drops one."""

    def scores(self, keep: str, start: int, newest: Sequence[int] = ()) -> NDArray[np.float32]:
        """Score the cached tokens from `start` on by a scorer of `capabilities.scorers`; a higher score is worth more.

        `newest`: the ids of the newest cached tokens, at most those since the last eviction. Scorers by attention
        compute them again, and leave the state as it is. Scores depend only on what is cached now, so two states that
        read the same text have bitwise equal scores.
        """

    def cached(self, layer: int, start: int, stop: int) -> CachedKV:
        """Return keys and values of the cached tokens from `start` to `stop` in a layer of `capabilities.kv_layers`.

        They may be views of the cache, valid until the next call, and must not be changed; from a narrow cache they are
        converted. Every cached token must have passed all layers.
        """

    def embedded(self, tokens: Sequence[int]) -> Floats:
        """Return the embeddings [token, width] of any tokens as the first layer reads them. Works if `cached` does."""

    def save(self, start: int, stop: int) -> Segment:
        """Copy the KV of the cached tokens from `start` to `stop`.

        After an eviction `start` must be 0, and `capabilities.can_save_evicted` true.
        """

    def save_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of the segment that `save` would return."""

    def restore(self, segment: Segment) -> None:
        """Append a saved segment."""

    def close(self) -> None: ...


class Chunk(NamedTuple):
    """Tokens to append to a state; `forward` returns the logits after the last `num_logits` of them.

    `exit_layer` ends the forward pass after that many layers; None runs all. `hidden` returns the hidden states after
    the last norm instead of logits. `features`, if given, is filled with the residual stream of every token after
    `capabilities.feature_layers`: float32 [tokens, `capabilities.feature_width`]. `second` is the index of the first
    token of a pair's second text, for engines that classify; 0: a single text.
    """

    state: State
    tokens: Sequence[int]
    num_logits: int
    exit_layer: int | None = None
    hidden: bool = False
    features: Features | None = None
    second: int = 0


class Engine(Protocol):
    """One loaded model. Owned by one Runtime, not thread-safe."""

    capabilities: Capabilities

    @property
    def notes(self) -> tuple[str, ...]:
        """Differences between the plan and how the engine runs on this machine."""

    def start(self, storage: KVCacheConfig) -> State: ...

    def state_bytes(self, storage: KVCacheConfig) -> int:
        """Return the exact bytes that `start` would allocate."""

    def forward(self, chunks: Sequence[Chunk]) -> list[Logits]:
        """Append each chunk's tokens to its state; return the logits after the last `num_logits` of each.

        If it raises, the states of the call are closed and unusable; other states are not affected.
        """

    def read_segment(self, path: Path) -> Segment:
        """Read a file of `Segment.write`. Raises `InvalidInput` unless it is whole and of this model's shapes."""

    def load_adapter(self, name: str, files: Path) -> int:
        """Load the LoRA in the PEFT folder `files` for `KVCacheConfig(adapter=name)`; return the bytes it takes."""

    def drop_adapter(self, name: str) -> None:
        """Unload an adapter. Raises `InvalidInput` while a state runs it."""

    def use_threads(self, count: int) -> None:
        """Compute with 1 to `capabilities.threads` threads from the next call on; `Unsupported` if it is None."""

    def interrupt(self) -> None:
        """End a running `forward` as soon as the library can; it and later ones raise `TargetFailed`.

        The only method that other threads may call, at any time. Afterwards an engine can only be closed.
        """

    def close(self) -> None: ...
