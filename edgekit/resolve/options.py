"""One offer under one setting, priced and held against the wish."""

from __future__ import annotations

from typing import NamedTuple

from edgekit import memory, speed
from edgekit.device import Budget, DeviceProfile
from edgekit.interfaces import Offer
from edgekit.model import ModelSpec
from edgekit.plan import Estimate, Quality, Speed
from edgekit.quality import prior
from edgekit.quality_facts import QualityFacts
from edgekit.resolve.settings import Setting, furthest_context
from edgekit.resolve.wish import Wish
from edgekit.units import show_bytes

CHUNK_TOKENS = 512


class Subject(NamedTuple):
    """What is planned: a model, where it came from, and a draft model beside it."""

    model: ModelSpec
    source: str
    config_sha256: str
    draft: ModelSpec | None = None
    draft_source: str | None = None
    measured: QualityFacts = QualityFacts()  # what was measured of this model's recipes


class Miss(NamedTuple):
    """A requirement that an option misses, before a cure was looked for."""

    what: str
    found: str
    allowed: str


class Option(NamedTuple):
    """An offer under a setting."""

    offer: Offer
    setting: Setting
    estimate: Estimate
    speed: Speed
    quality: Quality
    misses: tuple[Miss, ...]
    facts: tuple[str, ...] = ()  # the measurements that it was priced by


def price(
    subject: Subject, offer: Offer, setting: Setting, device: DeviceProfile, budget: Budget, wish: Wish
) -> Option:
    """Memory, speed and quality of an option, and what it misses."""
    model = subject.model
    chunk = min(CHUNK_TOKENS, setting.held_tokens)
    estimate = memory.predict(
        model,
        offer.recipe,
        offer.memory,
        held_tokens=setting.held_tokens,
        sequences=wish.sequences,
        kv_bits=setting.kv_bits,
        chunk_tokens=chunk,
        adapter_rank=wish.adapter_rank if offer.adapters else 0,
        context=setting.context,
        exits=wish.exits if offer.exits else (),
        draft_bytes=_draft_bytes(subject.draft, offer, setting, wish.sequences, chunk),
        drafts=subject.draft is not None,
    )
    pace = speed.predict(
        model, offer.recipe, offer.memory, offer.speed, device, held_tokens=setting.held_tokens, kv_bits=setting.kv_bits
    )
    found = subject.measured.find(offer.recipe, offer.target, offer.backend)
    quality = found.quality if found else prior(offer.recipe)
    misses = tuple(_misses(model, offer, setting, estimate, pace, quality, budget, wish))
    return Option(offer, setting, estimate, pace, quality, misses, (found.fact,) if found else ())


def _draft_bytes(draft: ModelSpec | None, offer: Offer, setting: Setting, sequences: int, chunk: int) -> int:
    if draft is None:
        return 0
    estimate = memory.predict(
        draft,
        offer.recipe,
        offer.memory,
        held_tokens=setting.held_tokens,
        sequences=sequences,
        kv_bits=setting.kv_bits,
        chunk_tokens=chunk,
    )
    return estimate.total_bytes - estimate.runtime_bytes


def _misses(
    model: ModelSpec,
    offer: Offer,
    setting: Setting,
    estimate: Estimate,
    pace: Speed,
    quality: Quality,
    budget: Budget,
    wish: Wish,
) -> list[Miss]:
    misses = []
    if offer.refusal:
        misses.append(Miss("offer", offer.refusal, "an offer that can be taken"))
    furthest = furthest_context(model, offer)
    if setting.held_tokens > furthest:
        what = "context" if setting.policy.window is None else "window"
        misses.append(Miss(what, f"{setting.held_tokens:,} tokens", f"{furthest:,} tokens"))
    if setting.kv_bits not in offer.kv_bits:
        misses.append(Miss("cache bits", str(setting.kv_bits), " or ".join(map(str, offer.kv_bits))))
    if over_bytes(estimate, budget, wish) > 0:
        private = min(budget.private_bytes, wish.max_memory_bytes or budget.private_bytes)
        total = min(budget.total_bytes, wish.max_memory_bytes or budget.total_bytes)
        if estimate.private_bytes > private:
            misses.append(
                Miss("memory", f"{show_bytes(estimate.private_bytes)} charged to the app", show_bytes(private))
            )
        else:
            misses.append(Miss("memory", show_bytes(estimate.total_bytes), show_bytes(total)))
    if wish.exits and not offer.exits:
        misses.append(Miss("exits", "none", f"after layer {', '.join(map(str, wish.exits))}"))
    if wish.adapter_rank and not offer.adapters:
        misses.append(Miss("adapters", "none", f"rank {wish.adapter_rank}"))
    if wish.min_quality is not None and quality.same_top < wish.min_quality:
        misses.append(Miss("quality", f"{quality.same_top:.3f} ({quality.basis})", f"{wish.min_quality:g}"))
    wanted = wish.min_tokens_per_second
    if wanted is not None and pace.decode_tokens_per_s < wanted:
        misses.append(Miss("speed", f"{pace.decode_tokens_per_s:g} tok/s", f"{wanted:g} tok/s"))
    limit = wish.max_first_token_s
    if limit is not None and (pace.first_token_s is None or pace.first_token_s > limit):
        found = "not known for this device" if pace.first_token_s is None else f"{pace.first_token_s:g} s"
        misses.append(Miss("first token", found, f"{limit:g} s"))
    return misses


def over_bytes(estimate: Estimate, budget: Budget, wish: Wish) -> int:
    """How far an estimate is over what may be used; not above 0 when it fits."""
    limit = wish.max_memory_bytes
    over = max(estimate.private_bytes - budget.private_bytes, estimate.total_bytes - budget.total_bytes)
    return over if limit is None else max(over, estimate.total_bytes - limit)
