"""What is in memory, and the terms of which targets compose its prediction. Pure arithmetic.

A target gives every term of what it allocates (`Target.memory`), with its own constants. The terms of a class add up to
its estimate, and their texts explain it. The planner adds the terms of what the runtime allocates for every target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from edgekit.common.units import show_bytes
from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.contracts.plan import MemoryFacts
from edgekit.contracts.recipe import Recipe
from edgekit.contracts.recurrent import checkpoint_tokens, part_bytes, recurrent_bytes
from edgekit.contracts.stored_weights import adapter_bytes, by_rows_bytes, rows_read_bytes, stored_weight_bytes
from edgekit.contracts.token_costs import CacheFormat, storing_layers
from edgekit.model.head_spec import HeadSpec
from edgekit.model.parts import Layer
from edgekit.model.spec import ModelSpec

# Most logit rows of one verification: for a sequence that drafts alone, and for each of several.
LONE_VERIFIED_ROWS, SHARED_VERIFIED_ROWS = 16, 3
TOKEN_FILE_BYTES = 50  # of a token in tokenizer files: 32 and 54 were measured


class Term(NamedTuple):
    """Bytes of one class, and the arithmetic behind them."""

    kind: str  # a field of `Estimate`
    bytes: int
    why: str


def sized(kind: str, size: int, what: str) -> Term:
    """Return a term whose text begins with its size."""
    return Term(kind, size, f"{show_bytes(size)} {what}")


def total(terms: Iterable[Term], *kinds: str) -> int:
    """Return the bytes of all terms, or of some classes only."""
    return sum(term.bytes for term in terms if not kinds or term.kind in kinds)


def verified_rows(sequences: int) -> int:
    """Return the upper bound on logit rows in one step when `sequences` requests verify drafts."""
    return max(LONE_VERIFIED_ROWS, SHARED_VERIFIED_ROWS * sequences)


class LayerArrays(NamedTuple):
    """The arrays that a target holds while it computes a layer: how many are alive at the same time."""

    bits: int = 32  # of a value
    hidden_copies: float = 3.0  # of the width of the residual
    inner_copies: float = 3.0  # of a feed-forward
    head_copies: float = 2.0  # of all heads
    own_input_copies: float = 4.0  # of the inputs that all layers have of their own (Gemma 4)
    reuses: bool = True  # True: the feed-forward reuses the memory of attention's arrays

    def layers_bytes(self, model: ModelSpec, tokens: int) -> int:
        """Return the bytes of the widest layer's intermediates for a chunk of `tokens`."""
        return round(tokens * _width(self, model) * self.bits / 8)

    def row_bytes(self, model: ModelSpec) -> int:
        """Return the bytes of one row of logits; an encoder has none."""
        return 0 if model.encoder else model.vocab_size * 4


@lru_cache(maxsize=256)
def _width(arrays: LayerArrays, model: ModelSpec) -> float:
    """Return how many values of the largest layer are alive at the same time, per token of a step."""
    heads = max(_mixed_width(model, layer) for layer in model.layers)
    feed_forward = max(layer.intermediate_size or model.intermediate_size for layer in model.layers)
    if model.experts:
        experts = model.experts
        feed_forward = max(feed_forward, experts.active * experts.intermediate_size)
    attending, feeding = arrays.head_copies * heads, arrays.inner_copies * feed_forward
    # The residual lives through a layer; at any time either attention or the feed-forward is alive too.
    working = max(attending, feeding) if arrays.reuses else attending + feeding
    own = model.per_layer_input.size * len(model.layers) if model.per_layer_input else 0
    return arrays.hidden_copies * model.hidden_size + arrays.own_input_copies * own + working


def _mixed_width(model: ModelSpec, layer: Layer) -> int:
    """Return the output width of a layer's first projections."""
    if layer.conv_taps:
        return 3 * model.hidden_size
    if layer.delta_rule:
        return layer.delta_rule.channels + layer.delta_rule.values
    queries, keys, values = model.qkv_widths(layer)
    return queries * (1 + model.attention_gate) + keys + values


class MemoryLoad(NamedTuple):
    """A model as a target runs it on a device, everything that is in memory with it, and terms of it."""

    model: ModelSpec
    recipe: Recipe
    backend: str
    facts: MemoryFacts
    held_tokens: int  # cached by each sequence
    sequences: int
    kv_bits: int
    chunk_tokens: int
    built_tokens: int | None = None  # cached by each sequence as the artifact was built; None: `held_tokens`
    draft_bytes: int = 0
    prefix_bytes: int = 0
    adapter_rank: int = 0
    context: int = 0  # sizes rotary tables where it exceeds `held_tokens`
    exits: Sequence[int] = ()
    state_bytes: int | None = None  # of one state, as an open engine reports it; None: by the formula
    drafts: bool = False  # True: proposals are verified
    head: HeadSpec | None = None  # the sealed head that drafts
    exact: bool = False
    policy: KVEvictionPolicy | None = None  # decides whether tokens are scored
    gpu_layers: int | None = None  # on a GPU, the head as one of them
    is_open: bool = False  # True: without what only opening takes

    @property
    def positions(self) -> int:
        """The positions of which rows and rotary tables are read."""
        return max(self.context, self.held_tokens)

    @property
    def next_rows(self) -> int:
        """The rows of logits from which a step of all sequences chooses tokens."""
        return verified_rows(self.sequences) if self.drafts else max(1, self.sequences)

    @property
    def logit_rows(self) -> int:
        """Most rows of logits in memory. Sampling copies one, and arrays of changing sizes fragment the heap."""
        return 1 + self.next_rows + (self.next_rows // 4 if self.drafts else 0)

    def call_tokens(self, capacity: int) -> int:
        """Return the most tokens of one call with room for `capacity`. Checkpoints of a recurrent part cut chunks."""
        return min(capacity, self.chunk_tokens, checkpoint_tokens(self.model) or self.chunk_tokens)

    def weights(
        self, *, mapped: float = 0.0, copied: float = 1.0, disk: float = 1.0, in_file: MemoryFacts | None = None
    ) -> list[Term]:
        """Return the weights as they are stored: the shares of them that are mapped, copied, and on disk.

        Per-layer embeddings that stay in the file are mapped by rows. `in_file`: how files store them, if otherwise.
        """
        given = self.model, self.recipe, self.facts
        by_rows, stored = by_rows_bytes(*given), stored_weight_bytes(*given)
        weights, copied = stored - by_rows, copied + self.facts.copied_share
        own = f"of rows of the per-layer embeddings, whose {show_bytes(by_rows)} stay in the file"
        return [
            Term("mapped_weights_bytes", round(weights * mapped), f"{weights:,} stored × {mapped:g} mapped"),
            sized("mapped_weights_bytes", rows_read_bytes(*given, self.positions), own),
            Term("private_weights_bytes", round(weights * copied), f"{weights:,} stored × {copied:g} copied"),
            sized("disk_bytes", round(stored_weight_bytes(*given[:2], in_file or self.facts) * disk), "of weights"),
            sized("disk_bytes", TOKEN_FILE_BYTES * self.model.vocab_size, "of tokens"),
        ]

    def caches(self, cache: CacheFormat) -> Term:
        """Return the caches of all sequences."""
        model, tokens, state = self.model, self.held_tokens, self.state_bytes
        counted = Counter[str]()
        for layer, count in storing_layers(model):
            held = cache.layer_tokens(layer, tokens)
            counted[f"2 × {layer.kv_heads} heads × {layer.head_dim} × {held:,} tokens"] += count
        keys = " + ".join(f"{count} layers × {each}" for each, count in counted.items())
        why = f"({keys}) × {self.kv_bits} bit{' + scales' if self.kv_bits < 16 and cache.scale_bits else ''}"
        shared = sum(model.kv_owner(index) != index for index in range(len(model.layers)))
        why += f"; {shared} layers share caches of others" if shared else ""
        if spacing := checkpoint_tokens(model):
            layers, part = sum(layer.is_recurrent for layer in model.layers), part_bytes(model)
            recurrent = f"{show_bytes(recurrent_bytes(model, tokens))} of {layers} recurrent layers: {show_bytes(part)}"
            why = f"({why} + {recurrent}, with a checkpoint every {spacing} tokens)"
        size = cache.state_bytes(model, tokens, self.kv_bits) if state is None else state
        return Term("kv_bytes", size * self.sequences, f"{self.sequences} × {why}")

    def tables(self, each: int) -> Term:
        """Return the mapped rotary tables, of `each` bytes for a position."""
        return Term("mapped_weights_bytes", each * self.positions, f"{self.positions:,} positions × {each} bytes")

    def runtime(self, layer_bytes: int = 0) -> list[Term]:
        """Return what the runtime holds: libraries, the tokenizer, and a graph of `layer_bytes` for each layer."""
        facts, layers = self.facts, len(self.model.layers)
        basis = "by its file" if facts.tokenizer_bytes is not None else "by its vocabulary"
        return [
            sized("runtime_bytes", facts.runtime_bytes, "of interpreter and vendor library"),
            sized("runtime_bytes", facts.tokenizer(self.model)[0], f"of tokenizer, {basis}"),
            Term("runtime_bytes", layer_bytes * layers, f"{layers} layers × {show_bytes(layer_bytes)} of graph"),
        ]

    def adapter(self, *, each: int = 0, once: int = 0) -> Term:
        """Return one adapter on every linear, with `each` bytes more for a linear, and others once."""
        if not self.adapter_rank:
            return Term("adapter_bytes", 0, "no room for adapters")
        size = once + adapter_bytes(self.model, self.adapter_rank, self.facts.float_bits or 32, each)
        return Term("adapter_bytes", size, f"one of rank {self.adapter_rank} on every linear")

    def layer(self, arrays: LayerArrays, tokens: int, rows: int, size: int | None = None) -> Term:
        """Return the widest layer of a step, and its logits. `size`: of both, where they reuse memory."""
        model = self.model
        width, counted = _width(arrays, model), arrays.layers_bytes(model, tokens) + rows * arrays.row_bytes(model)
        why = f"{tokens:,} tokens × {width:,.0f} wide × {arrays.bits} bit"
        why += "" if model.encoder else f" + {rows} × {model.vocab_size:,} logits × 4 bytes"
        return Term("activation_bytes", counted if size is None else size, why)

    def masks(self, tokens: int, cached: int, bits: int = 0) -> Term:
        """Return the masks of a step, of `bits` a value: one for each kind of window.

        An encoder's hold 32 bits for each head; in the worst case the chunk is a single text.
        """
        model, windows = self.model, {layer.window for layer in self.model.layers}
        size = len({window is None for window in windows}) * tokens * cached * bits // 8
        if model.encoder:
            size = 4 * (model.heads + len(windows - {None})) * tokens * tokens
        return sized("activation_bytes", size, "of attention's masks")

    def peak(self, step: list[Term], later: Iterable[Term], *opening: Term) -> list[Term]:
        """Return the largest step, and what reading the tokenizer or other work of opening takes more than it.

        Private terms that come `later`, drafts and prefixes reuse the memory of reading: they do not exist yet.
        """
        if self.is_open:
            return step
        _, size = self.facts.tokenizer(self.model)
        absent = total(later, "private_weights_bytes", "kv_bytes", "runtime_bytes")
        what = "to read the tokenizer, less library, graph, copied weights and cache, not there yet"
        left = size - absent - self.draft_bytes - self.prefix_bytes
        reading = Term("opening_bytes", left, f"{show_bytes(size)} {what}")
        most = max((*opening, reading), key=lambda term: term.bytes)
        more = max(0, most.bytes - total(step))
        return [*step, most._replace(bytes=more, why=f"{most.why}, less the activations")] if more else step


class ExportCosts(NamedTuple):
    """Private bytes of a target's own steps of an export, besides Python, torch and the model's largest tensors."""

    tools: int = 0  # libraries, once they are imported
    tokenizer: float = 1.0  # times what reading the tokenizer takes, while it is written
    vocabulary: float = 0.0  # times that, of the library's own vocabulary while the artifact runs
    value: float = 0.0  # of each weight that is traced and lowered
    cache: float = 0.0  # times the cache, which the lowered graphs hold


MemoryTerms = Callable[[MemoryLoad], Iterable[Term]]  # `Target.memory`


_ARRAYS, _CACHE = LayerArrays(), CacheFormat()


def usual_terms(
    load: MemoryLoad,
    weights: Sequence[Term] = (),
    arrays: LayerArrays = _ARRAYS,
    cache: CacheFormat = _CACHE,
    *,
    layer_bytes: int = 0,
    planned_rows: int = 0,
) -> list[Term]:
    """Return the terms of a target that copies its weights and allocates each cache and each step as it is asked for.

    `layer_bytes`: of a graph, for each layer. `planned_rows`: of logits with reserved memory, in addition to a step's.
    """
    weights, caches, runtime = weights or load.weights(), load.caches(cache), load.runtime(layer_bytes)
    tokens = load.call_tokens(load.held_tokens)
    step = [load.layer(arrays, tokens, load.logit_rows + planned_rows), load.masks(tokens, load.held_tokens)]
    return [*weights, caches, *load.peak(step, [*weights, runtime[-1], caches]), *runtime, load.adapter()]
