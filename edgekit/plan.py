"""A finished decision as frozen, versioned JSON: the same inputs give the same bytes. Pure data."""

from __future__ import annotations

from typing import Literal

from edgekit.cache import CachePolicy, Storage
from edgekit.frozen import Frozen
from edgekit.model import ModelSpec
from edgekit.recipe import Recipe

PLAN_VERSION = 1


class MemoryFacts(Frozen):
    """How a target turns stored bytes into memory. Each figure is measured or sourced; `source` says which."""

    mapped_share: float  # of the stored weights, mapped from files and never copied
    private_share: float  # of the stored weights, copied into private memory
    runtime_bytes: int  # interpreter, vendor library, tokenizer
    layer_bytes: int = 0  # and for each layer, of its graph
    opening_share: float = 0.0  # of the largest tensor's values, copied for a moment while the model is opened
    opening_scale_share: float = 1.0  # of its scales, likewise
    scale_bits: int = 16  # that the target stores for each scale
    bias_bits: int = 0  # and for each bias, where its format has one
    row_group: int | None = None  # after how many values an s8 row repeats its scale; None: never
    float_bits: int | None = None  # of what is not quantised; None: as the recipe stores it
    cache_scale_bits: int = 32  # beside each group of quantised keys and values; 0: their steps are fixed
    cache_groups: tuple[int, ...] = (64, 32)  # the first of these that divides a head is a group; empty: a head is
    widened_bits: int = 0  # of each value of a quantised cache, while its layer reads it
    activation_bits: int = 32
    # How many arrays are alive at once: as wide as the residual, as a feed-forward, as all heads.
    hidden_copies: float = 3.0
    inner_copies: float = 3.0
    head_copies: float = 2.0
    reuses_activations: bool = True  # whether a feed-forward lies where attention's arrays were
    running_bytes: int = 0  # that the first step takes beside them, once
    fixed_buffers: bool = False  # whether activations and one cache are as large as planned, whatever is asked for
    bounds_windows: bool = False  # whether layers with a window of their own keep no more than that
    returned_bytes: int | None = None  # of a prompt's activations: so many or more are given back once it is read
    verified_tokens: int = 0  # whose activations stay in memory when drafts were verified
    planned_rows: int = 0  # of logits whose memory is set apart ahead, whoever asks for them
    position_bytes: int = 0  # mapped for each position of the context: rotary tables
    looked_up_bytes: int = 0  # and of a tied table that stands beside the head, no more than all of it
    exit_copies: bool = False  # whether each exit copies its layers and the head once more
    disk_share: float = 1.0  # of the stored weights; above 1 where a packed copy is kept beside the original
    source: str


class SpeedFacts(Frozen):
    """What share of the device's bandwidth and compute a target reaches. `source` says where it was seen."""

    decode_share: float  # of usable bandwidth
    prefill_shares: tuple[tuple[Literal["fp32", "fp16", "int8"], float], ...]  # of peak compute; the first known counts
    step_overhead_s: float = 0.0
    source: str


class Estimate(Frozen):
    """Predicted bytes, by class."""

    mapped_weights_bytes: int  # clean pages of files: evictable, shared between processes
    private_weights_bytes: int  # copies that the runtime makes for itself
    kv_bytes: int  # all sequences
    activation_bytes: int  # the largest chunk
    runtime_bytes: int  # interpreter, vendor library, tokenizer
    draft_bytes: int = 0  # draft model: its weights, KV and activations
    prefix_bytes: int = 0  # the prefix cache
    adapter_bytes: int = 0  # one adapter of the planned rank, on every linear of the layers
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
            + self.adapter_bytes
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
    memory: MemoryFacts  # by which it was estimated
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
