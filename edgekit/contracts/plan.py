"""A plan as frozen, versioned JSON: the same inputs give the same bytes. Pure data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import ConfigDict, Field

from edgekit.common.base import Frozen
from edgekit.common.bounds import (
    Amount,
    Bits,
    Bytes,
    ChunkTokens,
    Factor,
    FileBytes,
    GpuLayers,
    LayerCount,
    Sequences,
    Sha256,
    Share,
    Text,
    Threads,
    Tokens,
    Version,
    Word,
)
from edgekit.contracts.device import Spread
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.contracts.recipe import Recipe
from edgekit.model.head_spec import HeadSpec
from edgekit.model.spec import ModelSpec

PLAN_VERSION = 2  # 1: without `quantisation`, which stood among `notes`
Method = Word  # none, rtn, gptq, kept (another tool chose the integers), or a method that a package adds
NOT_MADE_YET = (
    "calibrated, gptq chooses the integers; with --effort quick, and by default where that would take more than 15"
    " minutes, export rounds weights to the nearest (rtn), which loses 1.4 to 4 times as much"
)
ROUNDED = "weights were rounded to the nearest (rtn); calibrated, gptq loses less (--effort normal)"
# The largest mean KL, in nats, that a narrow KV cache may cost to be offered: about as much as weights rounded to
# 4 bits without calibration.
MAX_KV_KL = 0.2
_MAX_NOTES, _MAX_CANDIDATES = 1000, 10_000
# Assumed if a tokenizer's file was not read: bytes a token (286 to 381 were measured), and their multiple to read it.
_TOKENIZER_BYTES_A_TOKEN, _TOKENIZER_READING_SHARE = 384, 2.5


class MemoryFacts(Frozen):
    """What a plan's memory depends on besides its model, recipe and target. A target's own figures are in its code."""

    # Plans of older versions have the figures of their target here, too.
    model_config = ConfigDict(extra="ignore")

    runtime_bytes: FileBytes  # interpreter, vendor library
    # The open tokenizer, and the extra bytes while its file is parsed. None: the file was not read yet.
    tokenizer_bytes: FileBytes | None = None
    tokenizer_reading_bytes: FileBytes | None = None
    # Private bytes per byte of stored weights, where this machine cannot map them as planned; an open engine says so.
    copied_share: Factor = Field(0.0, exclude_if=lambda value: not value)
    # The target's word for how it holds weights here, where it has several ways.
    layout: Word | None = Field(None, exclude_if=lambda value: value is None)
    scale_bits: Bits = 16  # per stored scale
    bias_bits: Bits = 0  # bits of a stored bias, if the format has biases
    minimum_bits: Bits = Field(0, exclude_if=lambda value: not value)  # of each minimum, where a bias is not one
    row_group: Annotated[int, Field(ge=1)] | None = None  # values of an s8 row that share a scale; None: the whole row
    # Values per stored copy of a scale, for formats that repeat the scale of larger groups. None: one copy per group.
    scale_group: Annotated[int, Field(ge=1)] | None = None
    float_bits: Annotated[int, Field(ge=1, le=64)] | None = None  # of unquantised values; None: as the recipe stores
    # Per-layer embeddings stay in the mapped file: bytes mapped per position on top of its row. None: held as weights.
    own_row_bytes: FileBytes | None = None
    # Layers on a GPU: in its own memory, copied into the memory that it shares, or mapped there from the file.
    gpu_memory: Literal["own", "shared", "mapped"] | None = None
    source: Text

    def tokenizer(self, model: ModelSpec) -> tuple[int, int]:
        """Return the bytes of the tokenizer, and the extra bytes while its file is read."""
        assumed = model.vocab_size * _TOKENIZER_BYTES_A_TOKEN
        held = assumed if self.tokenizer_bytes is None else self.tokenizer_bytes
        reading = self.tokenizer_reading_bytes
        return held, round(held * _TOKENIZER_READING_SHARE) if reading is None else reading


Shares = tuple[tuple[Literal["fp32", "fp16", "int8"], Factor], ...]


class SpeedFacts(Frozen):
    """How an engine uses a device, from `source`: a step reads, or multiplies if that is longer, and adds times."""

    bandwidth_share: Factor = 1.0  # of the bandwidth that decoding reaches on this processor
    layer_s: Factor = 0.0  # for each layer, unless the profile states it
    expert_layer_s: Factor = 0.0  # more, for each layer of experts
    # Of peak compute in prefill, by number type: the first with a known peak. `float_shares`: of float weights.
    prefill_shares: Shares
    float_shares: Shares = ()  # empty: as integers
    # Of prefill's rate, what a single row of integers reaches, as kernels multiply several rows. 0: bytes take longer.
    row_share: Factor = 0.0
    # By cache bits: how fast its bytes are read, relative to bytes of weights; 1 if it is not stated. Narrow caches
    # take arithmetic, so a quarter of the bytes is not read in a quarter of the time.
    cache_shares: tuple[tuple[Annotated[int, Field(ge=1, le=64)], Annotated[float, Field(gt=0, le=1)]], ...] = ()
    # The lowest and highest that devices of this class gave, relative to the prediction.
    spread: Spread = (0.7, 1.3)
    is_timed: bool = False  # on this machine
    source: Text


DEFAULT_CONTEXT = 8192  # tokens, without a requested context and if the model has as many positions
PROMPT_TOKENS = 512  # the prompt before a predicted first token; at most half the context

# The classes of memory in display order, as fields of `Estimate`. The disk is none of them.
CLASSES = {
    "mapped_weights_bytes": "mapped weights",
    "private_weights_bytes": "private weights",
    "kv_bytes": "cache",
    "activation_bytes": "activations",
    "opening_bytes": "opening",
    "runtime_bytes": "runtime",
    "draft_bytes": "draft",
    "prefix_bytes": "prefixes",
    "adapter_bytes": "adapters",
}


class Estimate(Frozen):
    """Predicted bytes, by class."""

    mapped_weights_bytes: Bytes  # clean pages of files: evictable, shared between processes
    private_weights_bytes: Bytes  # the runtime's own copies
    kv_bytes: Bytes  # all sequences
    activation_bytes: Bytes  # the largest chunk
    runtime_bytes: Bytes  # interpreter, vendor library, tokenizer, graph
    # What only opening takes, above the activations of a step, which reuse that memory.
    opening_bytes: Bytes = Field(0, exclude_if=lambda value: not value)
    draft_bytes: Bytes = 0  # draft model: its weights, KV and activations
    prefix_bytes: Bytes = 0  # the prefix cache
    adapter_bytes: Bytes = 0  # one adapter of the planned rank, on every linear of the layers
    disk_bytes: Bytes = 0
    # Of `disk_bytes`, what the device that opens the artifact keeps in its cache.
    cached_disk_bytes: Bytes = Field(0, exclude_if=lambda value: not value)
    gpu_bytes: Bytes | None = None  # in a GPU's own memory, on top of all classes; None: no layers have such a memory

    @property
    def classes(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes) of each class of memory, in display order; without the disk."""
        return tuple((name, getattr(self, kind)) for kind, name in CLASSES.items())

    @property
    def private_bytes(self) -> int:
        """Bytes that every OS charges to the app."""
        return self.total_bytes - self.mapped_weights_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the artifact's files."""
        return self.disk_bytes - self.cached_disk_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes that must be in memory for full speed."""
        return sum(size for _, size in self.classes)


class SpeedRange(NamedTuple):
    """Tokens a second: what devices of this class give at least, what is expected, and at most."""

    low: float
    expected: float
    high: float

    def show(self, between: str = "-") -> str:
        """Return two figures of each end, e.g. `28-41`; of plans that have no range, the expected speed."""
        ends = (float(f"{end:.2g}") for end in (self.low, self.high))
        return f"{self.expected:g}" if self.low == self.high else between.join(f"{end:g}" for end in ends)


class Speed(Frozen):
    """Predicted speed; `basis` names the figures behind it, `origin` where they come from."""

    prefill_tokens_per_s: Amount | None  # None: the device's compute is not known
    decode_tokens_per_s: Amount
    first_token_s: Amount | None  # None: the device's compute is not known
    # Low, expected and high. None in plans of older versions, which predicted one figure.
    decode_range: tuple[Amount, Amount, Amount] | None = Field(None, exclude_if=lambda value: value is None)
    origin: Text | None = Field(None, exclude_if=lambda value: value is None)
    basis: Text

    @property
    def decode(self) -> SpeedRange:
        """Decoded tokens a second, as a range."""
        return SpeedRange(*(self.decode_range or (self.decode_tokens_per_s,) * 3))

    def show(self) -> str:
        """Return the range of decoding and its source."""
        return f"{self.decode.show(' to ')} tok/s" + (f" ({self.origin})" if self.origin else "")

    def decoding_at(self, tokens_per_s: float) -> Speed:
        """Return the speed with another expected rate and the same spread."""
        scale = tokens_per_s / self.decode_tokens_per_s
        around = None if self.decode_range is None else tuple(float(f"{scale * each:.3g}") for each in self.decode)
        return self.model_copy(update={"decode_tokens_per_s": float(f"{tokens_per_s:.3g}"), "decode_range": around})


class Quality(Frozen):
    """Predicted or measured loss against the float model."""

    kl: Amount | None  # mean divergence, nats per token: the highest that was measured; None: nothing was
    same_top: Share | None  # of tokens on which both models rank the same token first: the lowest
    kl_low: Amount | None = Field(None, exclude_if=lambda value: value is None)
    basis: Literal["prior", "measured"]
    origin: Text | None = Field(None, exclude_if=lambda value: value is None)  # of a prior: what was measured
    source: Text

    @property
    def loss(self) -> float:
        """The KL, by which recipes are ordered; infinite if nothing was measured."""
        return math.inf if self.kl is None else self.kl

    def show(self) -> str:
        """Return the share of top tokens kept, with a mark for a prior."""
        mark = "~" if self.basis == "prior" else ""
        return "not measured" if self.same_top is None else f"{mark}{self.same_top:.3f}"


class Quantisation(Frozen):
    """The method that chose the integers, and the text it was calibrated on."""

    method: Method
    calibration: Text | None = None  # a description; None: no text was used
    rescales: bool = Field(False, exclude_if=lambda value: not value)  # inputs of linears, so that no adapter fits


class Violation(NamedTuple):
    """A requirement that a candidate misses, before a fix is known."""

    what: str
    found: str
    allowed: str


class Failure(Frozen):
    """A requirement that a candidate misses, with the smallest change that would meet it."""

    what: Text
    found: Text
    allowed: Text
    cure: Text


class Rejected(Frozen):
    """A rejected candidate: the requirements it misses or, without failures, why another was better."""

    target: Word
    backend: Word
    recipe: Text
    context: Tokens
    failures: tuple[Failure, ...]
    reason: Text
    estimate: Estimate | None
    speed: Speed | None
    quality: Quality | None


class FallbackStep(Frozen):
    """One step down the context ladder: the change and the saved bytes."""

    change: Text
    saved_bytes: Annotated[int, Field(ge=-(1 << 100), le=1 << 100)]


def source_notes(quantised_as: str | None, recipe: Recipe | None = None) -> tuple[str, ...]:
    """Return the notes on a source with matrices in the types `quantised_as`; none if they are float."""
    if recipe is not None and recipe.keeps is not None:
        return (f"its own integers ({recipe.keeps}) are kept as they are, and not rounded again",)
    if quantised_as is None:
        return ()
    if "MXFP4" in quantised_as and recipe is not None and any(rule.format.kind == "mxfp4" for rule in recipe.rules):
        return (f"the source is {quantised_as}: mxfp4 keeps its MXFP4 values, and other formats round them twice",)
    if recipe is not None and all(rule.format.kind == "float32" for rule in recipe.rules):
        return (f"the source is {quantised_as}, not float: float32 keeps its values as they are",)
    return (f"the source is {quantised_as}, not float: with this recipe its values are rounded twice",)


class Plan(Frozen):
    """The decision how to build a model for a device and how to run it."""

    version: Version = PLAN_VERSION
    model: ModelSpec
    model_source: Text  # folder, file, hub id or bundled name, as given
    model_sha256: Sha256  # of config.json
    quantised_as: Text | None = None  # types of the source's matrices; None: they are float
    device: Word
    device_sha256: Sha256  # of the profile
    os_version: Text
    target: Word
    backend: Word
    recipe: Recipe
    quantisation: Quantisation | None = None  # None: nothing is quantised yet, or nothing will be
    context: Tokens
    sequences: Sequences
    chunk_tokens: ChunkTokens  # largest prefill chunk
    cache: KVEvictionPolicy
    storage: KVCacheConfig
    exits: Annotated[tuple[LayerCount, ...], Field(max_length=16)] = ()
    adapter_rank: Annotated[int, Field(ge=0, le=1024)] = 0
    threads: Threads
    gpu_layers: GpuLayers | None = None  # on the GPU, the head as one and then the last; None: cannot be divided
    draft: Text | None = None
    drafter: HeadSpec | None = None  # the drafting head that is sealed with the model
    drafter_source: Text | None = None  # its folder, as given
    # Widths of the KV cache that cost more than `MAX_KV_KL`, as the export measured, and the mean KL of each.
    costly_kv: Annotated[tuple[tuple[Bits, Amount], ...], Field(max_length=64)] = Field(
        (), exclude_if=lambda value: not value
    )
    estimate: Estimate
    # Private memory that `export` takes on the machine that planned, with its defaults; not sealed.
    export_bytes: Bytes = Field(0, exclude_if=lambda value: not value)
    memory: MemoryFacts
    budget_bytes: FileBytes
    budget_why: Text
    speed: Speed
    quality: Quality
    ladder: Annotated[tuple[FallbackStep, ...], Field(max_length=_MAX_NOTES)] = ()
    rejected: Annotated[tuple[Rejected, ...], Field(max_length=_MAX_CANDIDATES)] = ()
    notes: Annotated[tuple[Text, ...], Field(max_length=_MAX_NOTES)] = ()
    facts: Annotated[tuple[Text, ...], Field(max_length=_MAX_NOTES)] = ()  # keys of the machine facts it relies on

    @property
    def built_as(self) -> str:
        """Target, backend and recipe, as one text."""
        return f"{self.target} {self.backend} {self.recipe.name}"

    @property
    def rescaled_by(self) -> str | None:
        """The recipe or method that scaled the inputs of adapters, so that no adapter fits; None if nothing did."""
        if self.recipe.smooth:
            return f"recipe {self.recipe.name}"
        made = self.quantisation
        return made.method if made and (made.rescales or made.method == "awq") else None  # old plans name awq alone

    @property
    def source_notes(self) -> tuple[str, ...]:
        """Notes on the source, to show with every quality figure."""
        return source_notes(self.quantised_as, self.recipe)

    def offered_kv_bits(self, kv_bits: Sequence[int]) -> tuple[int, ...]:
        """Return the cache widths of an engine that do not cost too much, and the planned one in any case."""
        costly = dict(self.costly_kv)
        return tuple(bits for bits in kv_bits if bits not in costly or bits == self.storage.kv_bits)

    def kv_note(self, kv_bits: int) -> str:
        """Say what a width of `costly_kv` costs, and whether it can be used."""
        costs = f"a KV cache of {kv_bits} bits costs this model a KL of {dict(self.costly_kv)[kv_bits]:.2f}"
        if kv_bits == self.storage.kv_bits:
            return f"{costs}, which is much; --kv-bits of another width loses less"
        return f"{costs}, more than {MAX_KV_KL:g}, so it is left out; export with --kv-bits {kv_bits} to have it"

    @property
    def kv_notes(self) -> tuple[str, ...]:
        """Notes on all widths of `costly_kv`."""
        return tuple(self.kv_note(bits) for bits, _ in self.costly_kv)

    @property
    def all_notes(self) -> tuple[str, ...]:
        """`notes`, costly caches, and the quantisation method."""
        chosen = not (self.recipe.is_exact() or self.recipe.is_native() or self.recipe.keeps or self.model.encoder)
        if self.version < 2 or not chosen:
            return (*self.notes, *self.kv_notes)
        made = self.quantisation
        if made is None or made.method in ("none", "rtn"):
            return (*self.notes, *self.kv_notes, NOT_MADE_YET if made is None else ROUNDED)
        text = f" on {made.calibration}" if made.calibration else ""
        return (*self.notes, *self.kv_notes, f"{made.method} chose the integers{text}")

    def to_json(self) -> str:
        """Return the canonical text: the same plan always gives the same bytes."""
        return self.model_dump_json(indent=1) + "\n"
