"""The eviction policy and configuration of a KV cache. Pure arithmetic."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field, ValidationError, model_validator

from edgekit.common.base import Frozen
from edgekit.common.bounds import MAX_TOKENS, Text, Tokens
from edgekit.errors import InvalidInput


class Eviction(NamedTuple):
    """Cached tokens to drop, by their position in the state."""

    start: int
    stop: int


class KVEvictionPolicy(Frozen):
    """Keep everything (`window` None), or the first `sinks` tokens and the newest, `window` tokens in total.

    A full window drops its oldest `block` tokens after the sinks. Between `window - block` and `window` tokens are
    then cached, and the tokens that position p attends to depend only on p and the policy.
    """

    window: Annotated[int, Field(le=MAX_TOKENS)] | None = None
    sinks: Annotated[int, Field(le=MAX_TOKENS)] = 0
    block: Annotated[int, Field(le=MAX_TOKENS)] = 64

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
        return self

    @staticmethod
    def of(window: int | None, sinks: int = 0) -> KVEvictionPolicy:
        """Return a policy with the default block: an eighth of the window, at most 64."""
        if window is None:
            return KVEvictionPolicy(sinks=sinks)
        return KVEvictionPolicy(window=window, sinks=sinks, block=max(1, min(64, (window - sinks) // 8)))

    def eviction(self, length: int) -> Eviction | None:
        """Return the tokens to drop before the next token enters a state of `length` cached tokens; None: none."""
        if self.window is None or length < self.window:
            return None
        return Eviction(self.sinks, self.sinks + self.block)

    def is_renewed(self, position: int) -> bool:
        """Return True at the first eviction, and wherever a window has dropped as many tokens as it holds since."""
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
    cache: KVEvictionPolicy, storage: KVCacheConfig, context: int | None, window: int | None, sinks: int
) -> tuple[KVEvictionPolicy, KVCacheConfig]:
    """Apply a caller's `context`, or `window` and `sinks`, to the planned cache; None keeps the plan's.

    Raises `InvalidInput` for a size below two or beyond the capacity.
    """
    if context is not None and window is not None:
        raise InvalidInput("context and window exclude each other: a window has no end; give one")
    if sinks and window is None:
        raise InvalidInput("sinks belong to a window; give window as well")
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
        policy = KVEvictionPolicy.of(window, sinks)
    except ValidationError as error:
        raise InvalidInput(f"window: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
    return policy, storage.model_copy(update={"capacity_tokens": tokens})
