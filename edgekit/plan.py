"""A finished decision as frozen, versioned JSON: the same inputs give the same bytes. Pure data."""

from __future__ import annotations

from typing import Literal

from edgekit.cache import CachePolicy, Storage
from edgekit.frozen import Frozen
from edgekit.model import ModelSpec
from edgekit.recipe import Recipe

PLAN_VERSION = 1


class Estimate(Frozen):
    """Predicted bytes, by class."""

    mapped_weights_bytes: int  # clean pages of files: evictable, shared between processes
    private_weights_bytes: int  # copies that the runtime makes for itself
    kv_bytes: int  # all sequences
    activation_bytes: int  # the largest chunk
    runtime_bytes: int  # interpreter, vendor library, tokenizer
    draft_bytes: int = 0  # draft model: its weights, KV and activations
    prefix_bytes: int = 0  # the prefix cache
    disk_bytes: int = 0

    @property
    def private_bytes(self) -> int:
        """What every OS charges to the app."""
        return self.total_bytes - self.mapped_weights_bytes

    @property
    def total_bytes(self) -> int:
        """What must be in memory for full speed."""
        return (
            self.mapped_weights_bytes
            + self.private_weights_bytes
            + self.kv_bytes
            + self.activation_bytes
            + self.runtime_bytes
            + self.draft_bytes
            + self.prefix_bytes
        )


class Speed(Frozen):
    """Predicted speed; `basis` says from what."""

    prefill_tokens_per_s: float | None  # None where the device's compute is not known
    decode_tokens_per_s: float
    first_token_s: float | None
    basis: str


class Quality(Frozen):
    """Predicted loss against the float model."""

    kl: float  # mean divergence, nats a token
    same_top: float  # share of tokens on which both put the same token first
    basis: Literal["prior", "measured"]
    source: str


class Failure(Frozen):
    """One requirement that an option misses, with the smallest change that would make it pass."""

    what: str
    found: str
    allowed: str
    cure: str


class Rejected(Frozen):
    """An option that was not taken: what it missed, or (without failures) why another was better."""

    target: str
    backend: str
    recipe: str
    context: int
    failures: tuple[Failure, ...]
    reason: str
    estimate: Estimate | None
    speed: Speed | None
    quality: Quality | None


class Step(Frozen):
    """One rung of the context ladder: what was given up, and the bytes it saved."""

    change: str
    saved_bytes: int


class Plan(Frozen):
    """What to build and how to run it."""

    version: int = PLAN_VERSION
    model: ModelSpec
    model_source: str  # folder or hub id, as given
    model_sha256: str  # of config.json
    device: str
    device_sha256: str  # of the profile
    os_version: str
    target: str
    backend: str
    recipe: Recipe
    context: int
    sequences: int
    chunk_tokens: int  # largest prefill chunk
    cache: CachePolicy
    storage: Storage
    exits: tuple[int, ...] = ()
    adapter_rank: int = 0
    threads: int
    draft: str | None = None
    estimate: Estimate
    budget_bytes: int
    budget_why: str
    speed: Speed
    quality: Quality
    ladder: tuple[Step, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()  # the machine facts that were used, by key

    def to_json(self) -> str:
        """The canonical text: the same plan always gives the same bytes."""
        return self.model_dump_json(indent=1) + "\n"
