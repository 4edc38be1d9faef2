"""The ladder of context: full, fewer cache bits, a window with sinks, a smaller context. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from edgekit.cache import CachePolicy
from edgekit.errors import InvalidInput
from edgekit.interfaces import Offer
from edgekit.model import ModelSpec
from edgekit.resolve.wish import WISHED_CONTEXT, Wish

WINDOWS = (8192, 4096, 2048, 1024, 512)
SINKS = 4
CONTEXT_STEP = 256
SMALLEST_CONTEXT = 256


class Setting(NamedTuple):
    """How much context is kept, and how. `rung` orders settings: a smaller one gives up less."""

    rung: tuple[int, int, int]
    context: int
    policy: CachePolicy
    kv_bits: int

    @property
    def held_tokens(self) -> int:
        return self.policy.window or self.context

    def describe(self) -> str:
        kept = f"context {self.context}"
        if self.policy.window is not None:
            kept = f"a window of {self.policy.window} with {self.policy.sinks} sinks"
        return f"{kept} at {self.kv_bits}-bit cache"


def wished_context(model: ModelSpec, wish: Wish) -> int:
    return wish.context or min(model.max_positions, WISHED_CONTEXT)


def asked_policy(wish: Wish) -> CachePolicy:
    """The policy that was asked for; a window too small for its sinks is refused."""
    try:
        return CachePolicy.of(wish.window, wish.sinks)
    except ValueError as error:
        message = str(error).splitlines()[2].strip() if "\n" in str(error) else str(error)
        raise InvalidInput(
            f"--window {wish.window} --sinks {wish.sinks}: {message.partition(', ')[2] or message}"
        ) from error


def ladder(model: ModelSpec, offer: Offer, wish: Wish) -> Iterator[Setting]:
    """Every setting of an offer, from the one that was asked for downwards.

    What was asked for by name is never given up: with an explicit context only the cache's bits may change.
    """
    if wish.kv_bits is not None:
        offer = offer.model_copy(update={"kv_bits": (wish.kv_bits,)})
    context = wished_context(model, wish)
    policy = asked_policy(wish)
    for index, bits in enumerate(offer.kv_bits):
        yield Setting((min(index, 1), index, 0), context, policy, bits)
    if wish.context is not None or wish.window is not None:
        return
    yield from windows(model, offer, context)
    yield from smaller_contexts(model, offer, context)


def furthest_context(model: ModelSpec, offer: Offer) -> int:
    """How many tokens can be held at once: as far as the model's positions and the offer reach."""
    return min(model.max_positions, offer.max_context or model.max_positions)


def windows(model: ModelSpec, offer: Offer, context: int) -> Iterator[Setting]:
    """Windows with sinks, largest first."""
    if not offer.can_evict:
        return
    for step, window in enumerate(WINDOWS):
        if window < context and window <= furthest_context(model, offer):
            for index, bits in enumerate(offer.kv_bits):
                yield Setting((2, step, index), context, CachePolicy.of(window, SINKS), bits)


def smaller_contexts(model: ModelSpec, offer: Offer, context: int) -> Iterator[Setting]:
    """Smaller contexts, largest first, each at the most cache bits."""
    last = (min(context - 1, furthest_context(model, offer)) // CONTEXT_STEP) * CONTEXT_STEP
    for smaller in range(last, SMALLEST_CONTEXT - 1, -CONTEXT_STEP):
        for index, bits in enumerate(offer.kv_bits):
            yield Setting((3, -smaller, index), smaller, CachePolicy(), bits)
