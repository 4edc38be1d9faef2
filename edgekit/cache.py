"""Which tokens stay in the KV cache (CachePolicy) and how a state holds them (Storage). Pure arithmetic."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import ValidationError, model_validator

from edgekit.errors import InvalidInput
from edgekit.frozen import Frozen


class Eviction(NamedTuple):
    """Held tokens to drop, by their place in the state."""

    start: int
    stop: int


class CachePolicy(Frozen):
    """Keep everything (`window` None), or the first `sinks` tokens and the newest up to `window` in all.

    A full window loses its oldest `block` after the sinks, so between `window - block` and `window` tokens are held,
    and what position p sees depends on p and the policy alone.
    """

    window: int | None = None
    sinks: int = 0
    block: int = 64

    @model_validator(mode="after")
    def _leaves_room(self) -> CachePolicy:
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
    def of(window: int | None, sinks: int = 0) -> CachePolicy:
        """A policy with the usual block: an eighth of the window, at most 64."""
        if window is None:
            return CachePolicy(sinks=sinks)
        return CachePolicy(window=window, sinks=sinks, block=max(1, min(64, (window - sinks) // 8)))

    def eviction(self, length: int) -> Eviction | None:
        """What to drop before the next token is fed to a state that holds `length` tokens."""
        if self.window is None or length < self.window:
            return None
        return Eviction(self.sinks, self.sinks + self.block)

    def room(self, length: int) -> int | None:
        """How many tokens may be fed before the next eviction; None: any number. Chunks and proposals are cut here."""
        return None if self.window is None else max(0, self.window - length)


class Storage(Frozen):
    """How one state is held: how many tokens at most, how many bits a key or value has, and which adapter it runs."""

    capacity_tokens: int
    kv_bits: int
    adapter: str | None = None


def hold(
    cache: CachePolicy, storage: Storage, context: int | None, window: int | None, sinks: int
) -> tuple[CachePolicy, Storage]:
    """Which tokens are kept, and how many at most: as they were, or as asked where there is room for it."""
    if context is not None and window is not None:
        raise InvalidInput("context and window exclude each other: a window has no end; give one")
    if sinks and window is None:
        raise InvalidInput("sinks belong to a window; give window as well")
    asked = context if context is not None else window
    if asked is None:
        return cache, storage
    name = "context" if window is None else "window"
    if type(asked) is not int or asked < 2:
        raise InvalidInput(f"{name}: must be a whole number of tokens above one, found {asked!r}")
    if asked > storage.capacity_tokens:
        raise InvalidInput(
            f"{name}: {asked} tokens are more than the {storage.capacity_tokens} that there is room for; "
            f"open with more, or export again with `--{name} {asked}`"
        )
    try:
        policy = CachePolicy.of(window, sinks)
    except ValidationError as error:
        raise InvalidInput(f"window: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
    return policy, storage.model_copy(update={"capacity_tokens": asked})
