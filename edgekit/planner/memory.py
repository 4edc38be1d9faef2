"""Predicts memory term by term. The terms of a class add up to its estimate, and their texts explain it.

Facts about devices, targets and measurements come in as arguments.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from edgekit.common.units import show_bytes
from edgekit.contracts.activations import activation_width, attention_bytes, layers_bytes, residual_bytes
from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.contracts.plan import CLASSES, Estimate, MemoryFacts, Plan
from edgekit.contracts.recipe import Recipe
from edgekit.contracts.recurrent import (
    checkpoint_tokens,
    part_bytes,
    recurrent_bytes,
    recurrent_shapes,
    step_part_bytes,
)
from edgekit.contracts.stored_weights import (
    adapter_bytes,
    by_rows_bytes,
    exit_bytes,
    layer_table,
    rows_read_bytes,
    stored_weight_bytes,
    tensor_bytes,
)
from edgekit.contracts.token_costs import held_tokens, kv_bytes, storing_layers
from edgekit.model.spec import ModelSpec
from edgekit.planner.gpu_layers import divided
from edgekit.planner.head_memory import head_why
from edgekit.planner.scoring_memory import scoring_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Most logit rows of one verification: for a sequence that drafts alone, and for each of several.
LONE_VERIFIED_ROWS, SHARED_VERIFIED_ROWS = 16, 3
# The shares of the stored weights, which may depend on the recipe.
SHARES = ("mapped_share", "private_share", "disk_share")


class Term(NamedTuple):
    """Bytes of one class, and the arithmetic behind them."""

    kind: str  # a field of `Estimate`
    bytes: int
    why: str


class MemoryLoad(NamedTuple):
    """A model with a target's facts, and everything that is in memory with it."""

    model: ModelSpec
    recipe: Recipe
    facts: MemoryFacts
    held_tokens: int  # cached by each sequence
    sequences: int
    kv_bits: int
    chunk_tokens: int
    draft_bytes: int = 0
    prefix_bytes: int = 0
    adapter_rank: int = 0
    context: int = 0  # sizes rotary tables where it exceeds `held_tokens`
    exits: Sequence[int] = ()
    state_bytes: int | None = None  # of one state, as an open engine reports it; None: by the formula
    drafts: bool = False  # True: proposals are verified
    exact: bool = False
    policy: KVEvictionPolicy | None = None  # decides whether tokens are scored
    gpu_layers: int | None = None  # on a GPU, the head as one of them

    @property
    def cached_tokens(self) -> int:
        """Tokens for which a cache has room."""
        return _in_steps(self.held_tokens + (self.exact and self.facts.exact_scores), self.facts)

    @property
    def call_tokens(self) -> int:
        """Most tokens of one call."""
        # Buffers that are allocated ahead have room for one chunk of every sequence.
        most = self.cached_tokens * self.sequences if self.facts.fixed_buffers else self.held_tokens
        # Chunks of a model with a recurrent part are cut at its checkpoints.
        return min(most, self.chunk_tokens, checkpoint_tokens(self.model) or self.chunk_tokens)

    @property
    def fed_tokens(self) -> int:
        """Most tokens that a layer computes at once."""
        piece = self.facts.half_cache_tokens if self.kv_bits == 16 else 0
        return min(self.call_tokens, piece or self.call_tokens)


def load_of(plan: Plan) -> MemoryLoad:
    """Return what a plan has in memory."""
    return MemoryLoad(
        plan.model,
        plan.recipe,
        plan.memory,
        held_tokens=plan.storage.capacity_tokens,
        sequences=plan.sequences,
        kv_bits=plan.storage.kv_bits,
        chunk_tokens=plan.chunk_tokens,
        draft_bytes=plan.estimate.draft_bytes,
        prefix_bytes=plan.estimate.prefix_bytes,
        adapter_rank=plan.adapter_rank,
        context=plan.context,
        exits=plan.exits,
        drafts=plan.draft is not None or plan.drafter is not None,
        policy=plan.cache,
        gpu_layers=plan.gpu_layers,
    )


def predict(load: MemoryLoad) -> Estimate:
    """Predict the memory of a load: the sum of its terms, divided between the processor and a GPU."""
    sums = Counter[str]()
    for term in terms(load):
        sums[term.kind] += term.bytes
    return divided(Estimate(**sums), load.model, load.recipe, load.facts, load.gpu_layers)


def explain(plan: Plan) -> list[str]:
    """Return the arithmetic of a plan's estimate, one line per class."""
    load, whys = load_of(plan), dict[str, str]()
    for kind, size, why in terms(load):
        if kind not in whys:
            whys[kind] = why
        elif size:
            whys[kind] += f" + {why}"
    whys["activation_bytes"] += _exact_note(load)
    if plan.drafter is not None:
        whys["draft_bytes"] = head_why(plan.drafter)
    names = (CLASSES | {"disk_bytes": "on disk"}).items()
    return [f"{name:<15} {show_bytes(getattr(plan.estimate, kind)):>9} = {whys[kind]}" for kind, name in names]


def terms(load: MemoryLoad) -> list[Term]:
    """Return every term, before layers on a GPU are divided off. An empty class has a term that says so."""
    model, recipe, facts, rank = load.model, load.recipe, load.facts, load.adapter_rank
    by_rows = by_rows_bytes(model, recipe, facts)
    weights = stored_weight_bytes(model, recipe, facts) - by_rows
    private, held, stored = _private(load, weights), _held(load), weights + by_rows
    adapter = adapter_bytes(model, rank, facts.float_bits or 32, each=facts.adapted_linear_bytes)
    adapter += facts.deriving_bytes if rank else 0
    return [
        *_mapped(load, weights),
        *private,
        *held,
        *_activations(load, _sum(private), _sum(held)),
        *_runtime(load),
        Term("adapter_bytes", adapter, f"one of rank {rank} on every linear" if rank else "no room for adapters"),
        Term("disk_bytes", round(stored * facts.disk_share), f"{stored:,} stored × {facts.disk_share:g}"),
    ]


def _sized(kind: str, size: int, what: str) -> Term:
    return Term(kind, size, f"{show_bytes(size)} {what}")


def _sum(parts: Iterable[Term]) -> int:
    return sum(term.bytes for term in parts)


def _mapped(load: MemoryLoad, weights: int) -> list[Term]:
    """Return clean pages of files: the weights, and what grows with the context."""
    model, recipe, facts, kind = load.model, load.recipe, load.facts, "mapped_weights_bytes"
    tokens = max(load.context, load.held_tokens)
    rows = looked_up_bytes(model, recipe, facts, tokens) if model.tied else 0
    whole = show_bytes(by_rows_bytes(model, recipe, facts))
    own = f"of rows of the per-layer embeddings, whose {whole} stay in the file"
    return [
        Term(kind, round(weights * facts.mapped_share), f"{weights:,} stored × {facts.mapped_share:g} mapped"),
        Term(kind, facts.position_bytes * tokens, f"{tokens:,} positions × {facts.position_bytes} bytes"),
        _sized(kind, rows, "of rows that tokens look up"),
        _sized(kind, rows_read_bytes(model, recipe, facts, tokens), own),
    ]


def _private(load: MemoryLoad, weights: int) -> list[Term]:
    facts, kind = load.facts, "private_weights_bytes"
    return [
        Term(kind, round(weights * facts.private_share), f"{weights:,} stored × {facts.private_share:g} copied"),
        _sized(kind, exit_bytes(load.model, load.recipe, facts, load.exits), "again for exits"),
    ]


def _held(load: MemoryLoad) -> list[Term]:
    """Return what is allocated after opening."""
    state = load.state_bytes
    if state is None:
        state = cache_bytes(load.model, load.held_tokens, load.kv_bits, load.facts)
    draft = "draft model, its cache and activations" if load.draft_bytes else "no draft model"
    return [
        Term("kv_bytes", state * load.sequences, _cache_formula(load)),
        Term("draft_bytes", load.draft_bytes, draft),
        Term("prefix_bytes", load.prefix_bytes, "prefix cache" if load.prefix_bytes else "no prefix cache"),
    ]


def _cache_formula(load: MemoryLoad) -> str:
    model, facts, tokens = load.model, load.facts, load.held_tokens
    counted = Counter[tuple[int, int, int]]()
    for layer, count in storing_layers(model):
        counted[layer.kv_heads, layer.head_dim, held_tokens(layer, tokens, facts.bounds_windows)] += count
    parts = [
        f"{count} layers × 2 × {heads} heads × {dim} × {held:,} tokens" for (heads, dim, held), count in counted.items()
    ]
    scales = " + scales" if load.kv_bits < 16 and facts.cache_scale_bits else ""
    shared = sum(model.kv_owner(index) != index for index in range(len(model.layers)))
    scales += f"; {shared} layers share caches of others" if shared else ""
    spacing = checkpoint_tokens(model)
    if spacing is None:
        return f"{load.sequences} × ({' + '.join(parts)}) × {load.kv_bits} bit{scales}"
    copy, recurrent = show_bytes(part_bytes(recurrent_shapes(model))), show_bytes(recurrent_bytes(model, tokens))
    layers = sum(layer.is_recurrent for layer in model.layers)
    extra = f"{recurrent} of {layers} recurrent layers: {copy}, with a checkpoint every {spacing} tokens"
    return f"{load.sequences} × (({' + '.join(parts)}) × {load.kv_bits} bit{scales} + {extra})"


def _activations(load: MemoryLoad, private_bytes: int, later_bytes: int) -> list[Term]:
    """Return the largest step, or what opening takes if that is more.

    The cache, drafts and prefixes reuse the memory that only opening needed.
    """
    model, facts, kind = load.model, load.facts, "activation_bytes"
    opening, (_, reading) = opening_bytes(model, load.recipe, facts), facts.tokenizer(model)
    not_yet = private_bytes + facts.layer_bytes * len(model.layers) + facts.library_bytes
    copied = "to open the largest tensor, less the cache, which does not exist yet"
    read = "to read the tokenizer, less library, graph, copied weights and cache, not there yet"
    most = max(
        _step(load),
        [Term(kind, opening - later_bytes, f"{show_bytes(opening)} {copied}")],
        [Term(kind, reading - not_yet - later_bytes, f"{show_bytes(reading)} {read}")],
        key=_sum,
    )
    scoring = scoring_bytes(model, load.policy, facts, kv_bits=load.kv_bits, sequences=load.sequences)
    return [*most, _sized(kind, scoring, "to score tokens")]


def _step(load: MemoryLoad) -> list[Term]:
    """Return what the largest step takes: its widest layer and logits, masks, copies of caches and recurrent parts."""
    model, facts, kind, calls = load.model, load.facts, "activation_bytes", load.call_tokens
    masks, scores = attention_bytes(model, calls, load.cached_tokens, facts, exact=load.exact)
    return [
        _largest_layer(load, residual_bytes(model, calls, facts) + scores if scores else 0),
        _sized(kind, reading_bytes(load), f"to read the {load.kv_bits}-bit cache"),
        _sized(kind, facts.running_bytes, "for the first step"),
        _sized(kind, masks, "of attention's masks"),
        _sized(kind, _recurrent_bytes(load), "of recurrent parts in a step"),
    ]


def _largest_layer(load: MemoryLoad, attending_bytes: int) -> Term:
    """Return the widest layer with the logits, or attention with all its scores if the target stores them at once."""
    model, facts = load.model, load.facts
    tokens, rows = _largest_step(load, load.fed_tokens)
    size, width = _step_bytes(load, tokens, rows), activation_width(model, facts)
    if attending_bytes > size:
        return _sized("activation_bytes", attending_bytes, "of attention's scores")
    why = f"{tokens:,} tokens × {width:,.0f} wide × {facts.activation_bits} bit"
    why += "" if model.encoder else f" + {rows} × {model.vocab_size:,} logits × 4 bytes"
    return Term("activation_bytes", size, why)


def _exact_note(load: MemoryLoad) -> str:
    """Say what exact mode takes in addition, of which its larger caches are a part."""
    if not load.facts.exact_scores:
        return ""
    state = cache_bytes(load.model, load.held_tokens + 1, load.kv_bits, load.facts)
    more = _sum(terms(load._replace(exact=True, state_bytes=state))) - _sum(terms(load))
    return f"; exact mode takes {show_bytes(more)} more" if more else ""


def _runtime(load: MemoryLoad) -> list[Term]:
    facts, kind, layers = load.facts, "runtime_bytes", len(load.model.layers)
    basis = "by its file" if facts.tokenizer_bytes is not None else "by its vocabulary"
    graph = f"{layers} layers × {show_bytes(facts.layer_bytes)} of graph"
    deriving = facts.deriving_bytes if load.kv_bits < 32 else 0
    return [
        _sized(kind, facts.runtime_bytes, "of interpreter and vendor library"),
        _sized(kind, facts.tokenizer(load.model)[0], f"of tokenizer, {basis}"),
        Term(kind, facts.layer_bytes * layers, graph),
        _sized(kind, deriving, "to derive graphs for this cache"),
    ]


def looked_up_bytes(model: ModelSpec, recipe: Recipe, facts: MemoryFacts, tokens: int) -> int:
    """Return the mapped bytes of the embeddings of `tokens` tokens."""
    table = next(tensor for tensor in model.tensors() if tensor.role == "embedding")
    return min(facts.looked_up_bytes * tokens, recipe.format_of(table).bytes(table.shape))


def cache_bytes(model: ModelSpec, tokens: int, kv_bits: int, facts: MemoryFacts) -> int:
    """Return the bytes of one sequence's cache as a target stores it: its keys and values, and its recurrent part."""
    bounded, scales, groups = facts.bounds_windows, facts.cache_scale_bits, facts.cache_groups
    recurrent, tokens = recurrent_bytes(model, tokens), _in_steps(tokens, facts)
    return recurrent + kv_bytes(model, tokens, kv_bits, bounds_windows=bounded, scale_bits=scales, groups=groups)


def _in_steps(tokens: int, facts: MemoryFacts) -> int:
    return -(-tokens // facts.cache_step_tokens) * facts.cache_step_tokens


def activation_bytes(load: MemoryLoad, tokens: int) -> int:
    """Return the bytes that the largest step of `tokens` needs for its widest layer and its logits."""
    return _step_bytes(load, *_largest_step(load, tokens))


def _recurrent_bytes(load: MemoryLoad) -> int:
    """Return the extra bytes of recurrent state that a step allocates."""
    if checkpoint_tokens(load.model) is None:
        return 0
    spare = activation_bytes(load, load.fed_tokens) - activation_bytes(load, load.sequences)
    return step_part_bytes(load.model, load.facts.recurrent_copies, load.sequences, spare)


def _step_bytes(load: MemoryLoad, tokens: int, rows: int) -> int:
    model, facts = load.model, load.facts
    layers, row = layers_bytes(model, tokens, facts), 0 if model.encoder else model.vocab_size * 4
    if not facts.reuses_for_logits:
        return layers + rows * row
    planned = min(rows, facts.planned_rows)
    return max(layers, residual_bytes(model, tokens, facts) + planned * row) + (rows - planned) * row


def _largest_step(load: MemoryLoad, tokens: int) -> tuple[int, int]:
    """Return the tokens and logit rows of the largest step: prefill of a chunk, or verification for all sequences."""
    facts, sequences, drafts = load.facts, load.sequences, load.drafts
    # One more row: sampling copies one row at a time.
    most, extra = verified_rows(sequences) if drafts else max(1, sequences), 1 + facts.planned_rows
    extra += most // 4 if drafts else 0  # arrays of changing sizes fragment the heap
    left = facts.verified_tokens if drafts else 0
    reading = tokens + left, extra + (most if sequences > 1 else 1)  # a lone sequence does one at a time
    returned = facts.returned_bytes is not None and layers_bytes(load.model, tokens, facts) >= facts.returned_bytes
    verifying = (min(tokens, most) if returned else tokens) + left, extra + most
    return max(reading, verifying, key=lambda step: _step_bytes(load, *step))


def verified_rows(sequences: int) -> int:
    """Return the upper bound on logit rows in one step when `sequences` requests verify drafts."""
    return max(LONE_VERIFIED_ROWS, SHARED_VERIFIED_ROWS * sequences)


@lru_cache(maxsize=256)
def opening_bytes(model: ModelSpec, recipe: Recipe, facts: MemoryFacts) -> int:
    """Return the temporary bytes of opening: a copy of the largest tensor, before the graph exists."""
    if not facts.opening_share:
        return 0
    bits, group, floats = facts.scale_bits + facts.bias_bits, facts.row_group, facts.float_bits
    most = 0.0
    in_file = layer_table(model).module if by_rows_bytes(model, recipe, facts) else None
    for tensor in model.tensors():
        if tensor.role != "norm" and tensor.module != in_file:
            form = recipe.format_of(tensor)
            values = tensor_bytes(tensor.shape, form, 0, group, floats)
            scales = tensor_bytes(tensor.shape, form, bits, group, floats) - values
            most = max(most, values * facts.opening_share + scales * facts.opening_scale_share)
    return max(0, round(most) - facts.layer_bytes * len(model.layers))


def without_tokenizer(facts: MemoryFacts) -> MemoryFacts:
    """Return the facts of a draft model, which keeps no tokenizer in memory."""
    return facts.model_copy(update={"tokenizer_bytes": 0, "tokenizer_reading_bytes": 0})


def after_opening(facts: MemoryFacts) -> MemoryFacts:
    """Return the facts without the temporary bytes of opening."""
    return facts.model_copy(update={"tokenizer_reading_bytes": 0, "opening_share": 0.0})


def reading_bytes(load: MemoryLoad) -> int:
    """Return the extra bytes of a step that attends to a cache in 16 bits or fewer."""
    model, facts, piece = load.model, load.facts, load.fed_tokens
    widest = max(sum(model.qkv_widths(layer)[1:]) for layer in model.layers)
    if load.kv_bits < 16:
        return load.held_tokens * widest * facts.widened_bits // 8
    if load.kv_bits > 16 or not facts.half_cache_tokens:
        return 0
    # Scores in 16 and 32 bits (6 bytes), half as much for earlier pieces; keys and values in 32 bits; and the residual
    # in and out of a part.
    residual = 2 * (load.call_tokens - piece) * model.hidden_size * facts.activation_bits // 8
    return (9 * model.heads * piece + 4 * widest) * load.held_tokens + residual


def with_facts(plan: Plan, memory: MemoryFacts, recipe: Recipe | None = None) -> Plan:
    """Return the plan with these facts and this recipe. Every class of its estimate changes as they predict."""
    after = plan.model_copy(update={"memory": memory, "recipe": recipe or plan.recipe})
    before, now = (predict(load_of(each)) for each in (plan, after))
    changed = {
        name: max(0, planned + getattr(now, name) - getattr(before, name))
        for name in Estimate.model_fields
        if (planned := getattr(plan.estimate, name)) is not None
    }
    return after.model_copy(update={"estimate": plan.estimate.model_copy(update=changed)})
