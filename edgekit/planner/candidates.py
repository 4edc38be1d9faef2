"""Candidates: one offer in one setting, with its predicted memory, speed and quality and the requirements it misses."""

from __future__ import annotations

from typing import NamedTuple

from edgekit.common.units import show_bytes
from edgekit.contracts.device import Budget, DeviceProfile
from edgekit.contracts.memory import MemoryLoad
from edgekit.contracts.plan import Estimate, Method, Quality, Speed, Violation
from edgekit.contracts.quality_measurements import QualityFacts
from edgekit.contracts.target import Offer, Target
from edgekit.contracts.token_costs import touched_weight_bytes
from edgekit.model.head_spec import HeadSpec
from edgekit.model.spec import ModelSpec
from edgekit.planner import memory, speed
from edgekit.planner.engine_choice import TimedEngines
from edgekit.planner.gpu_layers import divided, most_that_fit, shares_of, with_host_layers
from edgekit.planner.head_memory import head_to_seal
from edgekit.planner.ladder import ContextConfig, furthest_context
from edgekit.planner.quality_priors import prior
from edgekit.planner.request import PlanRequest

CHUNK_TOKENS = 512


def chunk_tokens(model: ModelSpec, setting: ContextConfig) -> int:
    """Return the largest number of tokens in a step. An encoder needs a whole text, or several short ones, in one."""
    return setting.held_tokens if model.encoder else min(CHUNK_TOKENS, setting.held_tokens)


class PlanSubject(NamedTuple):
    """The model to plan, its origin, and its draft model if there is one."""

    model: ModelSpec
    source: str
    config_sha256: str
    draft: ModelSpec | None = None
    draft_source: str | None = None
    drafter: HeadSpec | None = None  # the drafting head that is sealed with the model
    measured: QualityFacts = QualityFacts()  # of this model's recipes
    method: Method = "rtn"  # by which an export will choose integers of 4 bits
    rounds: bool = False  # an export takes only recipes that rounding alone makes
    timed: TimedEngines = TimedEngines()  # for models of this size
    is_stored: bool = False  # True: neutral weights, whose recipe is settled
    quantised_as: str | None = None  # types of the source's matrices; None: they are float
    notes: tuple[str, ...] = ()  # on how the source was read
    rounded_notes: tuple[str, ...] = ()  # on matrices that are rounded although the others keep the source's integers

    def head_of(self, offer: Offer) -> HeadSpec | None:
        """Return the drafting head as it is sealed for an offer."""
        return None if self.drafter is None else head_to_seal(self.drafter, self.model, offer)


class Candidate(NamedTuple):
    """An offer in one context setting, with its predicted memory, speed and quality."""

    offer: Offer
    setting: ContextConfig
    estimate: Estimate
    speed: Speed
    quality: Quality
    violations: tuple[Violation, ...]
    facts: tuple[str, ...] = ()  # names of the measurements behind its quality
    gpu_layers: int | None = None


def price(
    subject: PlanSubject,
    target: Target,
    offer: Offer,
    setting: ContextConfig,
    device: DeviceProfile,
    budget: Budget,
    request: PlanRequest,
) -> Candidate:
    """Predict memory, speed and quality of an offer in a setting, and collect the requirements it misses."""
    model = subject.model
    chunk = chunk_tokens(model, setting)
    tokens, sequences, bits = setting.held_tokens, request.sequences, setting.kv_bits
    plain = MemoryLoad(model, offer.recipe, offer.backend, offer.memory, tokens, sequences, bits, chunk)
    head = subject.head_of(offer) if "drafting heads" in offer.capabilities.features else None
    private = head.private_bytes(tokens, sequences, chunk) if head is not None else 0
    load = plain._replace(
        adapter_rank=request.adapter_rank if offer.capabilities.adapters else 0,
        context=setting.context,
        exits=request.exits if "exits" in offer.capabilities.features else (),
        draft_bytes=_draft_bytes(subject.draft, plain, target) + private,
        drafts=subject.draft is not None or subject.drafter is not None,
        head=head,
        policy=setting.policy,
    )
    alone = memory.predict(load, target.memory)
    layers = _gpu_layers(load, offer, alone, budget, request)
    estimate = divided(alone, load, layers)
    predicted = speed.at_half(model, offer, device, held_tokens=setting.held_tokens, kv_bits=setting.kv_bits)
    if layers is not None and offer.memory.gpu_memory == "own":
        share = shares_of(model, offer.recipe, offer.memory, layers).linears
        read = touched_weight_bytes(model, offer.recipe, offer.memory)
        reached, _ = device.engine_figures(offer.target, offer.backend)
        bandwidth = reached.value * 1e9 * offer.speed.bandwidth_share
        predicted = with_host_layers(predicted, read, share, bandwidth)
    measured = subject.measured.find(offer.recipe, offer.target, offer.backend)
    quality = measured.quality if measured else prior(offer.recipe, model, offer.target, subject.method)
    facts = (measured.fact,) if measured else ()
    candidate = Candidate(offer, setting, estimate, predicted, quality, (), facts, layers)
    return candidate._replace(violations=tuple(_violations(candidate, model, budget, request)))


def _gpu_layers(load: MemoryLoad, offer: Offer, alone: Estimate, budget: Budget, request: PlanRequest) -> int | None:
    """Return the layers that run on a GPU: as requested, else all or as many as its memory holds."""
    most = offer.capabilities.gpu_layers
    if most is None:
        return None
    if request.gpu_layers is not None:
        return min(request.gpu_layers, most)
    return most_that_fit(alone, load, budget.total_bytes, most)


def _draft_bytes(draft: ModelSpec | None, load: MemoryLoad, target: Target) -> int:
    if draft is None:
        return 0
    load = load._replace(model=draft, facts=memory.without_tokenizer(load.facts))
    estimate = memory.predict(load, target.memory)
    return estimate.total_bytes - estimate.runtime_bytes


def is_only_listed(offer: Offer, request: PlanRequest) -> bool:
    """Return True if no setting makes the offer eligible: it is refused, or the request must name its target."""
    return offer.refusal is not None or _is_unnamed(offer, request)


def _is_unnamed(offer: Offer, request: PlanRequest) -> bool:
    return offer.only_by_name and request.target != offer.target


def _violations(candidate: Candidate, model: ModelSpec, budget: Budget, request: PlanRequest) -> list[Violation]:
    offer, setting, estimate = candidate.offer, candidate.setting, candidate.estimate
    quality, predicted = candidate.quality, candidate.speed
    violations, able = [], offer.capabilities
    if offer.refusal:
        violations.append(Violation("offer", offer.refusal, "an offer without a refusal"))
    if _is_unnamed(offer, request):
        unnamed = f"{offer.target} {offer.backend} was not requested by name"
        violations.append(Violation("target", unnamed, "by name only"))
    furthest = furthest_context(model, able)
    if setting.held_tokens > furthest:
        what = "context" if setting.policy.window is None else "window"
        violations.append(Violation(what, f"{setting.held_tokens:,} tokens", f"{furthest:,} tokens"))
    widths = setting.policy.widths(able.kv_bits)
    if setting.kv_bits not in widths:
        violations.append(Violation("cache bits", str(setting.kv_bits), " or ".join(map(str, widths)) or "none"))
    if setting.policy.is_scored and setting.policy.keep not in able.scorers:
        known = " or ".join(("newest", *able.scorers))
        violations.append(Violation("keep", f"no scores by {setting.policy.keep}", known))
    if request.gpu_layers is not None and (able.gpu_layers is None or request.gpu_layers > able.gpu_layers):
        allowed = "only where the target divides layers" if able.gpu_layers is None else f"at most {able.gpu_layers}"
        violations.append(Violation("GPU layers", str(request.gpu_layers), allowed))
    elif over_bytes(estimate, budget, request) > 0:
        worst = max(_memory_limits(estimate, budget, request), key=lambda limit: limit.over)
        violations.append(Violation("memory", f"{show_bytes(worst.needed)}{worst.where}", show_bytes(worst.allowed)))
    if request.exits and "exits" not in able.features:
        violations.append(Violation("exits", "none", f"after layer {', '.join(map(str, request.exits))}"))
    if request.adapter_rank and (not able.adapters or offer.recipe.smooth):
        violations.append(Violation("adapters", "none", f"rank {request.adapter_rank}"))
    if request.drafter and "drafting heads" not in able.features:
        violations.append(Violation("drafter", "no hidden states of the model", "those that the head reads"))
    if request.min_quality is not None and not (quality.same_top or 0.0) >= request.min_quality:
        violations.append(Violation("quality", quality.show(), f"{request.min_quality:g}"))
    floor = request.min_tokens_per_second
    if floor is not None and predicted.decode.low < floor:
        violations.append(Violation("speed", f"{predicted.decode.low:g} tok/s", f"{floor:g} tok/s"))
    limit = request.max_first_token
    if limit is not None and (predicted.first_token_s is None or predicted.first_token_s > limit):
        first = "not known for this device" if predicted.first_token_s is None else f"{predicted.first_token_s:g} s"
        violations.append(Violation("first token", first, f"{limit:g} s"))
    return violations


class _MemoryLimit(NamedTuple):
    """Bytes that an estimate needs of one kind of memory, and those it may use."""

    needed: int
    allowed: int
    where: str

    @property
    def over(self) -> int:
        return self.needed - self.allowed


def _memory_limits(estimate: Estimate, budget: Budget, request: PlanRequest) -> list[_MemoryLimit]:
    """Return the device's limits, for mapped bytes too, and the request's, which counts private bytes alone."""
    private, total, gpu = estimate.private_bytes, estimate.total_bytes, estimate.gpu_bytes
    limits = []
    if request.memory is not None:
        limits.append(_MemoryLimit(private, request.memory, " private"))
    if gpu is not None:
        limits.append(_MemoryLimit(gpu, budget.total_bytes, " on the GPU"))
    if gpu is not None and budget.host_bytes is not None:
        return [*limits, _MemoryLimit(total, budget.host_bytes, " in RAM next to the GPU")]
    charged = _MemoryLimit(private, budget.private_bytes, " charged to the app")
    return [*limits, _MemoryLimit(total, budget.total_bytes, ""), charged]


def over_bytes(estimate: Estimate, budget: Budget, request: PlanRequest) -> int:
    """Return the bytes by which an estimate exceeds the budget; 0 or less if it fits."""
    return max(limit.over for limit in _memory_limits(estimate, budget, request))


def allowed_bytes(estimate: Estimate, budget: Budget, request: PlanRequest) -> tuple[int, str]:
    """Return the private bytes that a plan may use, and why; if a GPU has its own memory, the bytes in RAM."""
    allowed, why = budget.private_bytes, budget.why
    if estimate.gpu_bytes is not None and budget.host_bytes is not None:
        room = show_bytes(budget.host_bytes)
        why = f"{room} of RAM next to the GPU, an eighth kept for the system; {budget.why.partition('; ')[0]}"
        allowed = budget.host_bytes
    if request.memory is not None and request.memory < allowed:
        return request.memory, f"as requested; the device has {show_bytes(allowed)}"
    return allowed, why
