"""The eviction policy and configuration of a KV cache. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol

from pydantic import Field, ValidationError, model_validator

from edgekit.common.base import Frozen
from edgekit.common.bounds import MAX_TOKENS, Text, Tokens, Word
from edgekit.errors import InvalidInput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NEWEST = "newest"
SCORED, BEST_SCORER = "scored", "valuediff"  # `scored` is the scorer that kept most in measurements
SPAN = 8  # tokens that a scored window keeps or drops together
LEAST_SCORED_BITS = 16


class Eviction(NamedTuple):
    """Cached tokens to drop, by their position in the state."""

    start: int
    stop: int


class Evictable(Protocol):
    """The methods of a state that a policy calls."""

    @property
    def position(self) -> int: ...
    @property
    def length(self) -> int: ...
    def evict(self, start: int, stop: int) -> None: ...
    def evict_spans(self, spans: Sequence[Eviction]) -> None: ...
    def scores(self, keep: str, start: int, newest: Sequence[int]) -> NDArray[np.float32]: ...


class KVEvictionPolicy(Frozen):
    """Keep everything (`window` None), or the first `sinks` tokens and `window - sinks` others.

    A full window drops `block` tokens: the oldest after the sinks (`keep` newest), or the spans of `SPAN` tokens that
    the scorer `keep` values least, outside the newest `protected` tokens. Between `window - block` and `window` tokens
    are then cached. Positions of evictions depend on the policy alone, and the dropped tokens on what is cached there,
    so the tokens that position p attends to depend only on the text before p and the policy.
    """

    window: Annotated[int, Field(le=MAX_TOKENS)] | None = None
    sinks: Annotated[int, Field(le=MAX_TOKENS)] = 0
    block: Annotated[int, Field(le=MAX_TOKENS)] = 64
    keep: Word = NEWEST

    @model_validator(mode="after")
    def _leaves_room(self) -> KVEvictionPolicy:
        if self.sinks < 0 or self.block < 1:
            raise ValueError("sinks cannot be negative and a block holds at least one token")
        if self.window is None and self.sinks:
            raise ValueError("sinks belong to a window; give window as well")
        if self.window is not None and self.window < self.sinks + self.block + 1:
            raise ValueError(
                f"a window of {self.window} has no room for {self.sinks} sinks, a block of {self.block} and one token"
            )
        if not self.is_scored:
            return self
        if self.window is None:
            raise ValueError("keep belongs to a window; give window as well")
        if self.block % SPAN or self.window - self.sinks - self.protected < 2 * self.block:
            raise ValueError(f"a window of {self.window} with {self.sinks} sinks is too small to keep tokens by scores")
        return self

    @staticmethod
    def of(window: int | None, sinks: int = 0, keep: str | None = None) -> KVEvictionPolicy:
        """Return a policy with the default block: an eighth of the window, at most 64."""
        keep = BEST_SCORER if keep == SCORED else keep or NEWEST
        if window is None:
            return KVEvictionPolicy(sinks=sinks, keep=keep)
        block = max(1, min(64, (window - sinks) // 8))
        if keep != NEWEST:
            block = max(SPAN, block // SPAN * SPAN)
        return KVEvictionPolicy(window=window, sinks=sinks, block=block, keep=keep)

    @property
    def is_scored(self) -> bool:
        return self.keep != NEWEST

    @property
    def how(self) -> str:
        """The words that a summary puts after the window: the scorer, if tokens are kept by scores."""
        return f" by {self.keep}" if self.is_scored else ""

    @property
    def protected(self) -> int:
        """The newest tokens of a full window, which are kept whatever their scores are."""
        return 0 if self.window is None else max(self.block, (self.window - self.sinks) // 2)

    def widths(self, kv_bits: Sequence[int]) -> tuple[int, ...]:
        """Return those widths of a cache that this policy can use."""
        return tuple(bits for bits in kv_bits if not self.is_scored or bits >= LEAST_SCORED_BITS)

    def make_room(self, state: Evictable, text: Sequence[int]) -> bool:
        """Drop tokens from a full state, which has read the beginning of `text`; return False if it is not full."""
        eviction = self.eviction(state.length)
        if eviction is None:
            return False
        if self.is_scored:
            newest = text[state.position - self.block : state.position]
            state.evict_spans(self.least(state.scores(self.keep, self.sinks, newest).tolist()))
        else:
            state.evict(*eviction)
        return True

    def least(self, scores: Sequence[float]) -> list[Eviction]:
        """Return the spans to drop, given the scores of all tokens after the sinks; neighbours are joined."""
        spans = (len(scores) - self.protected) // SPAN
        totals = [sum(scores[place * SPAN : (place + 1) * SPAN]) for place in range(spans)]
        least = sorted(range(spans), key=totals.__getitem__)[: self.block // SPAN]
        evictions: list[Eviction] = []
        for place in sorted(least):
            start = self.sinks + place * SPAN
            if evictions and evictions[-1].stop == start:
                start = evictions.pop().start
            evictions.append(Eviction(start, self.sinks + (place + 1) * SPAN))
        return evictions

    def eviction(self, length: int) -> Eviction | None:
        """Return the tokens to drop before the next token enters a state of `length` cached tokens; None: none."""
        if self.window is None or length < self.window:
            return None
        return Eviction(self.sinks, self.sinks + self.block)

    def is_renewed(self, position: int) -> bool:
        """Return True at the first eviction, and whenever a window has since dropped as many tokens as it holds."""
        if self.window is None or position < self.window:
            return False
        evictions = max(1, (self.window - self.sinks) // self.block)
        return (position - self.window) // self.block % evictions == 0

    def remaining_capacity(self, length: int) -> int | None:
        """Return how many tokens fit before the next eviction; None: no limit. Chunks and drafts end there."""
        return None if self.window is None else max(0, self.window - length)


class KVCacheConfig(Frozen):
    """The cache of one state: its capacity, the bits per key and value, and the state's LoRA adapter."""

    capacity_tokens: Tokens
    kv_bits: Annotated[int, Field(ge=1, le=64)]
    adapter: Text | None = None


def apply_limits(
    cache: KVEvictionPolicy,
    storage: KVCacheConfig,
    context: int | None,
    window: int | None,
    sinks: int,
    keep: str | None = None,
) -> tuple[KVEvictionPolicy, KVCacheConfig]:
    """Apply a caller's `context`, or `window`, `sinks` and `keep`, to the planned cache; None keeps the plan's.

    Raises `InvalidInput` for a size below two or beyond the capacity.
    """
    if context is not None and window is not None:
        raise InvalidInput("context and window exclude each other: a window has no end; give one")
    if sinks and window is None:
        raise InvalidInput("sinks belong to a window; give window as well")
    if keep is not None and window is None:
        raise InvalidInput("keep belongs to a window; give window as well")
    tokens = context if context is not None else window
    if tokens is None:
        return cache, storage
    name = "context" if window is None else "window"
    if type(tokens) is not int or tokens < 2:
        raise InvalidInput(f"{name}: must be a whole number of tokens above one, found {tokens!r}")
    if tokens > storage.capacity_tokens:
        raise InvalidInput(
            f"{name}: {tokens} tokens exceed the capacity of {storage.capacity_tokens}; "
            f"open with more, or export again with `--{name} {tokens}`"
        )
    try:
        policy = KVEvictionPolicy.of(window, sinks, keep)
    except ValidationError as error:
        raise InvalidInput(f"window: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
    return policy, storage.model_copy(update={"capacity_tokens": tokens})
