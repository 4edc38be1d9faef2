"""What a backend of a target can do with a model, and the refusals that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from edgekit.common.base import Frozen
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import Recipe
from edgekit.contracts.recurrent import is_recurrent
from edgekit.model.spec import ModelSpec

# The first four are properties of a model, minima one of kept integers, and the others are requested of a plan.
Feature = Literal[
    "encoders",
    "recurrent layers",
    "experts",
    "per-layer embeddings",
    "minima",
    "evictions",
    "exits",
    "drafting heads",
    "adapters",
]

# Why a feature is missing and what to do, for targets that do not say it themselves.
_WITHOUT: Mapping[Feature, str] = {
    "encoders": "{family} is an encoder, and this target runs decoders; use onnx on the CPU",
    "recurrent layers": "the recurrent layers of {family} are not supported; choose onnx or mlx",
    "experts": "the experts of {family} are not supported; choose onnx or mlx",
    "per-layer embeddings": "the layers of {family} are not supported; choose onnx",
    "minima": "integers whose groups add a minimum are not supported; choose --recipe s8, which rounds them again",
    "evictions": "a window needs evictions, which are not supported; plan without --window",
    "exits": "exits are not supported; plan without --exit",
    "drafting heads": "hidden states for a drafting head are not supported; plan without --drafter",
    "adapters": "adapters are not supported; merge the adapter into the float weights",
}
MOST_STATES, MOST_CHUNK_TOKENS = 1024, 65536  # of a target that states no smaller number


class Capabilities(Frozen):
    """What a backend can do with a model. An open engine's are what its artifact keeps of them (`narrowed`).

    The planner, the exporter, the scheduler, the conformance suites and the tables of the docs read this record. A
    request for anything else is refused, and the error names it.
    """

    vocabulary: int
    kv_bits: tuple[int, ...]  # widths of the cache, best first
    narrowest: str = ""  # why there is no narrower one
    refusal: str | None = None  # why it cannot run the model in this recipe, with the cure
    features: frozenset[Feature] = frozenset({"evictions"})
    why_not: Mapping[Feature, str] = {}  # why a feature is missing and what to do; else the general text below
    max_states: int = MOST_STATES
    max_chunk_tokens: int = MOST_CHUNK_TOKENS
    max_rewind: int | None = None  # None: all cached tokens
    max_position: int | None = None  # None: limited only by the capacity
    reserves_kv: bool = False  # the first state takes the memory of all states, and keeps it
    can_save: bool = True
    can_save_evicted: bool = False  # states can be saved after evictions too
    scorers: tuple[str, ...] = ()  # names by which `State.scores` can score cached tokens
    scorers_on_request: tuple[str, ...] = ()  # others, if the opened plan's window keeps tokens by one of them
    exits: tuple[int, ...] = ()  # of an artifact
    feature_layers: tuple[int, ...] = ()  # layers after which a chunk can ask for features
    feature_width: int = 0  # values of one token's features: hidden states of these layers, side by side
    kv_layers: tuple[int, ...] = ()  # whose keys and values `State.cached` hands out; `State.embedded` works then
    checkpoint_tokens: int | None = None  # spacing of checkpoints; None: states have no recurrent part
    hidden_size: int | None = None  # values of a hidden state; None: chunks cannot ask for them
    generates: bool = True  # False: an encoder, which gives hidden states of whole texts and no logits
    classifies: bool = False  # an encoder whose chunks may be pairs of texts, and give one logit for the whole
    gpu_layers: int | None = None  # the most that can run on a GPU, the head as one; None: layers cannot be divided
    copied_share: float = 0.0  # private bytes per byte of stored weights, where this machine cannot map them as planned
    threads: int | None = None  # the most for `use_threads`; None: the number is fixed at opening
    exact: Literal["always", "on_request", "never"]

    @property
    def can_evict(self) -> bool:
        return "evictions" in self.features

    @property
    def adapters(self) -> bool:
        return "adapters" in self.features

    def narrowed(self, plan: Plan, **found: object) -> Capabilities:
        """Return what an artifact of `plan` keeps of them. `found`: fields that are known once it is open."""
        head = plan.drafter
        kept: dict[str, object] = {
            "features": self.features if plan.adapter_rank else self.features - {"adapters"},
            "max_states": plan.sequences,
            "max_chunk_tokens": plan.chunk_tokens,
            "exits": tuple(sorted(set(plan.exits))),
            "feature_layers": head.hidden_layers if head is not None else (),
            "feature_width": head.width if head is not None else 0,
        }
        return Capabilities.model_validate(dict(self) | kept | found)

    def without(self, feature: Feature, family: str = "this model") -> str | None:
        """Return the reason why a feature is missing, with the cure; None if it is there."""
        if feature in self.features:
            return None
        return self.why_not.get(feature) or _WITHOUT[feature].format(family=family)


def model_refusal(model: ModelSpec, able: Capabilities) -> str | None:
    """Return the reason why a backend cannot run the model, in any recipe; None if it can."""
    needed: dict[Feature, bool] = {
        "encoders": model.encoder is not None,
        "recurrent layers": is_recurrent(model),
        "experts": model.experts is not None,
        "per-layer embeddings": bool(model.layer_scalars),
    }
    return _first_missing(needed, model, able)


def recipe_refusal(recipe: Recipe, able: Capabilities) -> str | None:
    """Return the reason why a backend cannot run models in this recipe; None if it can."""
    return able.refusal or (able.without("minima") if recipe.has_minima else None)


def plan_refusal(plan: Plan, able: Capabilities) -> str | None:
    """Return the reason why a backend cannot run the plan; None if it can."""
    model, bits, layers = plan.model, plan.storage.kv_bits, len(plan.model.layers)
    if reason := model.exportable or model_refusal(model, able) or recipe_refusal(plan.recipe, able):
        return reason
    if bits not in able.kv_bits:
        known = " or ".join(map(str, able.kv_bits))
        return f"kv_bits {bits} is not supported{able.narrowest}; plan with --kv-bits {known}"
    needed: dict[Feature, bool] = {
        "evictions": plan.cache.window is not None,
        "exits": bool(plan.exits),
        "drafting heads": plan.drafter is not None,
        "adapters": plan.adapter_rank > 0,
    }
    if reason := _first_missing(needed, model, able):
        return reason
    if any(not 0 < layer < layers for layer in plan.exits):
        return f"exits {list(plan.exits)} must lie between layer 1 and layer {layers - 1}"
    if plan.sequences > able.max_states:
        return f"{plan.sequences} sequences; it runs at most {able.max_states}"
    if plan.gpu_layers and plan.gpu_layers > (able.gpu_layers or 0):
        return f"{plan.gpu_layers} layers on the GPU; at most {able.gpu_layers or 0} can run there, the head as one"
    return None


def _first_missing(needed: Mapping[Feature, bool], model: ModelSpec, able: Capabilities) -> str | None:
    reasons = (able.without(feature, model.family) for feature, is_needed in needed.items() if is_needed)
    return next((reason for reason in reasons if reason), None)
