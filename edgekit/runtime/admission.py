"""The memory contract: what an opening is predicted to take, what it may take, and the ladder between the two.

The ladder is walked once, before anything runs: prefixes go first, then bits of the cache, then the whole text gives
way to a window, then to a smaller context; the last rung is a refusal with the numbers. It loads nothing and asks the
machine nothing: what is free is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from edgekit.cache import CachePolicy, Storage
from edgekit.errors import DoesNotFit
from edgekit.frozen import Frozen
from edgekit.memory import cache_bytes, predict
from edgekit.plan import Estimate, Plan, Step
from edgekit.units import show_bytes

OnPressure = Literal["degrade", "refuse"]
FEWEST_TOKENS = 128  # a window or context below that answers nothing
USUAL_SINKS = 4
_GRAIN_TOKENS = 64


class Allowed(NamedTuple):
    """How many private bytes this process may take in all, and who says so."""

    bytes: int
    why: str


class Opening(Frozen):
    """How an artifact is about to be run."""

    storage: Storage
    policy: CachePolicy
    sequences: int
    prefix_bytes: int = 0
    draft_bytes: int = 0
    drafts: bool = False


class Admitted(Frozen):
    """An opening that fits, what it is predicted to take, and what was given up for it."""

    opening: Opening
    estimate: Estimate
    allowed_bytes: int
    allowed_why: str
    ladder: tuple[Step, ...] = ()

    @property
    def shared_bytes(self) -> int:
        """What states, prefixes and adapters may take together: all that the fixed classes leave."""
        found = self.estimate
        return self.allowed_bytes - (found.private_bytes - found.kv_bytes - found.prefix_bytes - found.adapter_bytes)


StateBytes = Callable[[Storage], int]


def estimate_of(plan: Plan, opening: Opening, state_bytes: StateBytes | None = None) -> Estimate:
    """Predicted bytes of that opening; an open engine's `state_bytes` knows a state better than the formula."""
    storage, facts = opening.storage, plan.memory
    made = plan.storage if facts.fixed_buffers else storage
    tokens, bits = storage.capacity_tokens, storage.kv_bits
    found = predict(
        plan.model,
        plan.recipe,
        facts,
        held_tokens=made.capacity_tokens,
        sequences=opening.sequences,
        kv_bits=bits,
        chunk_tokens=plan.chunk_tokens,
        draft_bytes=opening.draft_bytes,
        drafts=opening.drafts,
        prefix_bytes=opening.prefix_bytes,
        context=plan.context,
        exits=plan.exits,
        state_bytes=state_bytes(storage) if state_bytes else cache_bytes(plan.model, tokens, bits, facts),
    )
    # A cache that was made for more tokens stands there, and nobody may fill it.
    unused = cache_bytes(plan.model, made.capacity_tokens - tokens, bits, facts)
    planned = plan.estimate
    return found.model_copy(
        update={
            "activation_bytes": found.activation_bytes + unused,
            # What no opening changes is as it was planned.
            "adapter_bytes": planned.adapter_bytes,
            "disk_bytes": planned.disk_bytes,
        }
    )


def admit(
    plan: Plan,
    wanted: Opening,
    allowed: Allowed,
    *,
    kv_bits: tuple[int, ...],
    can_evict: bool,
    on_pressure: OnPressure = "degrade",
    state_bytes: StateBytes | None = None,
) -> Admitted:
    """The first rung that fits; DoesNotFit with every rung's numbers where none does, or where none may be taken."""

    def priced(opening: Opening) -> Estimate:
        return estimate_of(plan, opening, state_bytes)

    first = priced(wanted)
    if first.private_bytes <= allowed.bytes:
        return Admitted(opening=wanted, estimate=first, allowed_bytes=allowed.bytes, allowed_why=allowed.why)
    opening, before, ladder = wanted, first, list[Step]()
    tried = [f"as asked ({_said(wanted)}): {show_bytes(first.private_bytes)}"]
    for change, next_opening in _rungs(wanted, allowed.bytes, priced, kv_bits, can_evict):
        found = priced(next_opening)
        ladder.append(Step(change=change, saved_bytes=before.private_bytes - found.private_bytes))
        tried.append(f"{change}: {show_bytes(found.private_bytes)}")
        opening, before = next_opening, found
        if found.private_bytes <= allowed.bytes:
            break
    fits = before.private_bytes <= allowed.bytes
    if fits and on_pressure == "degrade":
        return Admitted(
            opening=opening,
            estimate=before,
            allowed_bytes=allowed.bytes,
            allowed_why=allowed.why,
            ladder=tuple(ladder),
        )
    cure = f"give it {show_bytes(first.private_bytes)}"
    if fits:
        cure += ", or allow " + ", ".join(step.change for step in ladder) + " (on_pressure degrade)"
    raise DoesNotFit(
        f"{show_bytes(first.private_bytes)} of private memory are needed and {show_bytes(allowed.bytes)} are allowed "
        f"({allowed.why}); {cure}",
        table="\n".join([*_classes(first), *tried]),
    )


def _rungs(
    wanted: Opening,
    allowed_bytes: int,
    priced: Callable[[Opening], Estimate],
    kv_bits: tuple[int, ...],
    can_evict: bool,
) -> Iterator[tuple[str, Opening]]:
    """Each rung keeps what the ones before it gave up."""
    opening = wanted
    if opening.prefix_bytes:
        over = priced(opening).private_bytes - allowed_bytes
        left = max(0, opening.prefix_bytes - over)
        change = f"prefixes {show_bytes(opening.prefix_bytes)} → {show_bytes(left)}"
        opening = _with(opening, prefix_bytes=left)
        yield change, opening
    for bits in sorted((bits for bits in kv_bits if bits < wanted.storage.kv_bits), reverse=True):
        change = f"cache bits {opening.storage.kv_bits} → {bits}"
        opening = _with(opening, storage=opening.storage.model_copy(update={"kv_bits": bits}))
        yield change, opening
    if can_evict:
        held = opening.policy.window or opening.storage.capacity_tokens
        window = _most_tokens(held, allowed_bytes, lambda tokens: priced(_windowed(opening, tokens)).private_bytes)
        if window is not None:
            yield f"window {opening.policy.window or 'none'} → {window}", _windowed(opening, window)
            return
    if opening.policy.window is None:
        held = opening.storage.capacity_tokens
        context = _most_tokens(held, allowed_bytes, lambda tokens: priced(_shorter(opening, tokens)).private_bytes)
        context = context or min(held, FEWEST_TOKENS)
        yield f"context {held:,} → {context:,}", _shorter(opening, context)


def _most_tokens(held: int, allowed_bytes: int, price: Callable[[int], int]) -> int | None:
    """The most tokens below `held`, in whole grains, that fit."""
    low, high = FEWEST_TOKENS // _GRAIN_TOKENS, (held - 1) // _GRAIN_TOKENS
    if high < low or price(low * _GRAIN_TOKENS) > allowed_bytes:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if price(middle * _GRAIN_TOKENS) <= allowed_bytes:
            low = middle
        else:
            high = middle - 1
    return low * _GRAIN_TOKENS


def _windowed(opening: Opening, tokens: int) -> Opening:
    sinks = opening.policy.sinks if opening.policy.window else USUAL_SINKS
    return _with(_shorter(opening, tokens), policy=CachePolicy.of(tokens, min(sinks, tokens // 8)))


def _shorter(opening: Opening, tokens: int) -> Opening:
    return _with(opening, storage=opening.storage.model_copy(update={"capacity_tokens": tokens}))


def _with(opening: Opening, **changes: object) -> Opening:
    return opening.model_copy(update=changes)


def _said(opening: Opening) -> str:
    kept = (
        f"window {opening.policy.window}" if opening.policy.window else f"context {opening.storage.capacity_tokens:,}"
    )
    return f"{opening.sequences} × {kept}, {opening.storage.kv_bits}-bit cache"


def _classes(found: Estimate) -> list[str]:
    parts = (
        ("private weights", found.private_weights_bytes),
        ("cache", found.kv_bytes),
        ("activations", found.activation_bytes),
        ("runtime", found.runtime_bytes),
        ("draft", found.draft_bytes),
        ("prefixes", found.prefix_bytes),
        ("adapters", found.adapter_bytes),
    )
    return [f"{name:<15} {show_bytes(size):>9}" for name, size in parts if size]
