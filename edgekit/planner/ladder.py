"""The ladder of context settings: full, fewer cache bits, a window with sinks, a smaller context. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import ValidationError

from edgekit.contracts.capabilities import Capabilities
from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.contracts.plan import DEFAULT_CONTEXT
from edgekit.errors import InvalidInput
from edgekit.model.spec import ModelSpec
from edgekit.planner.request import PlanRequest

WINDOWS = (8192, 4096, 2048, 1024, 512)
SINKS = 4
CONTEXT_STEP = 256
SMALLEST_CONTEXT = 256


class ContextConfig(NamedTuple):
    """A context, its eviction policy and its cache bits. Smaller `fallback_step`s give up less and are tried first."""

    fallback_step: tuple[int, int, int]
    context: int
    policy: KVEvictionPolicy
    kv_bits: int

    @property
    def held_tokens(self) -> int:
        return self.policy.window or self.context

    def describe(self) -> str:
        kept = f"context {self.context}"
        if self.policy.window is not None:
            kept = f"a window of {self.policy.window}{self.policy.how} with {self.policy.sinks} sinks"
        return f"{kept} at {self.kv_bits}-bit cache"


def requested_context(model: ModelSpec, request: PlanRequest) -> int:
    """Return the requested context in tokens; by default the model's longest, at most `DEFAULT_CONTEXT`."""
    longest = model.embedding.max_tokens if model.embedding else None
    return request.context or min(model.max_positions, DEFAULT_CONTEXT, longest or DEFAULT_CONTEXT)


def requested_policy(request: PlanRequest) -> KVEvictionPolicy:
    """Return the requested policy. Raises `InvalidInput` for a window too small for its sinks."""
    try:
        return KVEvictionPolicy.of(request.window, request.sinks, request.keep)
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise InvalidInput(f"--window {request.window} --sinks {request.sinks}: {problem}") from error


def ladder(model: ModelSpec, able: Capabilities, request: PlanRequest) -> Iterator[ContextConfig]:
    """Yield every setting of a backend, from the requested one downwards.

    A requested context or window is never changed; then only the cache bits vary.
    """
    if request.kv_bits is not None:
        able = able.model_copy(update={"kv_bits": (request.kv_bits,)})
    context = requested_context(model, request)
    policy = requested_policy(request)
    for index, bits in enumerate(able.kv_bits):
        yield ContextConfig((min(index, 1), index, 0), context, policy, bits)
    if request.context is not None or request.window is not None:
        return
    yield from windows(model, able, context)
    yield from smaller_contexts(model, able, context)


def furthest_context(model: ModelSpec, able: Capabilities) -> int:
    """Return the most tokens that can be cached at once: the model's positions or the backend's limit."""
    return min(model.max_positions, able.max_position or model.max_positions)


def windows(model: ModelSpec, able: Capabilities, context: int) -> Iterator[ContextConfig]:
    """Yield windows with sinks, largest first."""
    if not able.can_evict:
        return
    for step, window in enumerate(WINDOWS):
        if window < context and window <= furthest_context(model, able):
            for index, bits in enumerate(able.kv_bits):
                yield ContextConfig((2, step, index), context, KVEvictionPolicy.of(window, SINKS), bits)


def smaller_contexts(model: ModelSpec, able: Capabilities, context: int) -> Iterator[ContextConfig]:
    """Yield smaller contexts, largest first, each with the most cache bits first."""
    last, policy = (min(context - 1, furthest_context(model, able)) // CONTEXT_STEP) * CONTEXT_STEP, KVEvictionPolicy()
    for smaller in range(last, SMALLEST_CONTEXT - 1, -CONTEXT_STEP):
        for index, bits in enumerate(able.kv_bits):
            yield ContextConfig((3, -smaller, index), smaller, policy, bits)
