"""Memory admission: predict what a configuration takes, and fall back to smaller ones until the prediction fits.

Fallback steps are taken once, at open, in this order: fewer prefixes, fewer bits of the cache, a window, a smaller
context. If no step fits, the refusal shows the numbers of each. Pure arithmetic: free memory is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from edgekit.common.base import Frozen
from edgekit.common.units import show_bytes
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.contracts.memory import MemoryTerms
from edgekit.contracts.plan import Estimate, FallbackStep, Plan
from edgekit.errors import DoesNotFit
from edgekit.planner.memory import load_of, predict

FEWEST_TOKENS = 128  # the smallest useful window or context
USUAL_SINKS = 4
_GRAIN_TOKENS = 64


OnPressure = Literal["degrade", "refuse"]


class MemoryLimit(NamedTuple):
    """The most private bytes that this process may use, and the source of that limit."""

    bytes: int
    source: str


class RunConfig(Frozen):
    """A configuration in which an artifact can be run."""

    kv_config: KVCacheConfig
    policy: KVEvictionPolicy
    sequences: int
    prefix_bytes: int = 0
    draft_bytes: int = 0
    drafts: bool = False
    head: bool = False  # drafts with the head that is sealed with the model
    exact: bool = False

    @property
    def summary(self) -> str:
        """A few words for a table or a log."""
        window = self.policy.window
        kept = f"window {window}{self.policy.how}" if window else f"context {self.kv_config.capacity_tokens:,}"
        return f"{self.sequences} × {kept}, {self.kv_config.kv_bits}-bit cache"

    def with_capacity(self, tokens: int) -> RunConfig:
        """Return a copy with a cache of `tokens` tokens."""
        return self.model_copy(update={"kv_config": self.kv_config.model_copy(update={"capacity_tokens": tokens})})

    def with_window(self, tokens: int) -> RunConfig:
        """Return a copy with a window of `tokens` tokens."""
        sinks = self.policy.sinks if self.policy.window else USUAL_SINKS
        policy = KVEvictionPolicy.of(tokens, min(sinks, tokens // 8), self.policy.keep)
        return self.with_capacity(tokens).model_copy(update={"policy": policy})


class AdmittedConfig(Frozen):
    """A configuration that fits, its predicted memory, and the fallback steps that led to it."""

    config: RunConfig
    estimate: Estimate
    open_bytes: int  # private, once it is open: without what only opening takes
    allowed_bytes: int
    allowed_why: str
    ladder: tuple[FallbackStep, ...] = ()

    @property
    def shared_bytes(self) -> int:
        """Bytes that states, prefixes and adapters share: the allowed bytes less all fixed classes."""
        estimate = self.estimate
        shared = estimate.kv_bytes + estimate.prefix_bytes + estimate.adapter_bytes
        return self.allowed_bytes - (self.open_bytes - shared)


StateBytes = Callable[[KVCacheConfig], int]


def estimate_of(
    plan: Plan, config: RunConfig, memory: MemoryTerms, state_bytes: StateBytes | None = None, *, is_open: bool = False
) -> Estimate:
    """Predict the bytes of a configuration with the terms of its target.

    An open engine's `state_bytes` replaces the formula for a state. `is_open`: without what only opening takes.
    """
    load = load_of(plan)._replace(
        held_tokens=config.kv_config.capacity_tokens,
        sequences=config.sequences,
        kv_bits=config.kv_config.kv_bits,
        draft_bytes=config.draft_bytes,
        prefix_bytes=config.prefix_bytes,
        adapter_rank=0,
        state_bytes=state_bytes(config.kv_config) if state_bytes else None,
        drafts=config.drafts,
        head=plan.drafter if config.head else None,
        exact=config.exact,
        policy=config.policy,
        is_open=is_open,
    )
    # The same in every configuration.
    same = {name: getattr(plan.estimate, name) for name in ("adapter_bytes", "disk_bytes", "cached_disk_bytes")}
    return predict(load, memory).model_copy(update=same)


Price = Callable[..., Estimate]  # `estimate_of` with everything but the configuration and `is_open`


def admit(
    price: Price,
    requested: RunConfig,
    limit: MemoryLimit,
    *,
    kv_bits: tuple[int, ...],
    can_evict: bool,
    on_pressure: OnPressure = "degrade",
) -> AdmittedConfig:
    """Return the first configuration that fits, from `requested` down the fallback steps.

    Raises DoesNotFit, with the numbers of every step, where none fits or `on_pressure` allows none.
    """

    first = price(requested)
    config, estimate, ladder = requested, first, list[FallbackStep]()
    tried = [f"as asked ({requested.summary}): {show_bytes(first.private_bytes)}"]
    if first.private_bytes > limit.bytes:
        for change, next_config in _fallback_steps(requested, limit.bytes, price, kv_bits, can_evict):
            next_estimate = price(next_config)
            saved = estimate.private_bytes - next_estimate.private_bytes
            ladder.append(FallbackStep(change=change, saved_bytes=saved))
            tried.append(f"{change}: {show_bytes(next_estimate.private_bytes)}")
            config, estimate = next_config, next_estimate
            if estimate.private_bytes <= limit.bytes:
                break
    fits = estimate.private_bytes <= limit.bytes
    if fits and (not ladder or on_pressure == "degrade"):
        return AdmittedConfig(
            config=config,
            estimate=estimate,
            open_bytes=price(config, is_open=True).private_bytes,
            allowed_bytes=limit.bytes,
            allowed_why=limit.source,
            ladder=tuple(ladder),
        )
    fix = f"give it {show_bytes(first.private_bytes)}"
    if fits:
        fix += ", or allow " + ", ".join(step.change for step in ladder) + " (on_pressure degrade)"
    raise DoesNotFit(
        f"{show_bytes(first.private_bytes)} of private memory are needed and {show_bytes(limit.bytes)} are allowed "
        f"({limit.source}); {fix}",
        table="\n".join([*class_lines(first), *tried]),
    )


def _fallback_steps(
    requested: RunConfig, limit_bytes: int, price: Price, kv_bits: tuple[int, ...], can_evict: bool
) -> Iterator[tuple[str, RunConfig]]:
    """Yield each step and its configuration, which includes the steps before it."""
    config = requested
    if config.prefix_bytes:
        excess = price(config).private_bytes - limit_bytes
        remaining = max(0, config.prefix_bytes - excess)
        change = f"prefixes {show_bytes(config.prefix_bytes)} → {show_bytes(remaining)}"
        config = config.model_copy(update={"prefix_bytes": remaining})
        yield change, config
    for bits in sorted((bits for bits in kv_bits if bits < requested.kv_config.kv_bits), reverse=True):
        change = f"cache bits {config.kv_config.kv_bits} → {bits}"
        config = config.model_copy(update={"kv_config": config.kv_config.model_copy(update={"kv_bits": bits})})
        yield change, config
    capacity = config.kv_config.capacity_tokens
    if can_evict:
        window = _most_tokens(
            config.policy.window or capacity,
            limit_bytes,
            lambda tokens: price(config.with_window(tokens)).private_bytes,
        )
        if window is not None:
            yield f"window {config.policy.window or 'none'} → {window}", config.with_window(window)
            return
    if config.policy.window is None:
        context = _most_tokens(capacity, limit_bytes, lambda tokens: price(config.with_capacity(tokens)).private_bytes)
        context = context or min(capacity, FEWEST_TOKENS)
        yield f"context {capacity:,} → {context:,}", config.with_capacity(context)


def _most_tokens(capacity: int, limit_bytes: int, price: Callable[[int], int]) -> int | None:
    """Return the largest multiple of 64 tokens below `capacity` that fits; None if not even the smallest does."""
    low, high = FEWEST_TOKENS // _GRAIN_TOKENS, (capacity - 1) // _GRAIN_TOKENS
    if high < low or price(low * _GRAIN_TOKENS) > limit_bytes:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if price(middle * _GRAIN_TOKENS) <= limit_bytes:
            low = middle
        else:
            high = middle - 1
    return low * _GRAIN_TOKENS


def class_lines(estimate: Estimate) -> list[str]:
    """Return one line for each class of private memory, for a `DoesNotFit`."""
    private = (each for each in estimate.classes if each[0] != "mapped weights")
    return [f"{name:<15} {show_bytes(size):>9}" for name, size in private if size]
