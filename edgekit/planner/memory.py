"""Predicts memory by class: every formula, with the text that explains it.

Facts about devices, targets and measurements come in as arguments.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

from edgekit.common.units import show_bytes
from edgekit.contracts.activations import activation_width, attention_bytes, layers_bytes, residual_bytes
from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.contracts.plan import Estimate, MemoryFacts, Plan
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
from edgekit.planner.scoring_memory import scoring_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

# Most logit rows of one verification: for a sequence that drafts alone, and for each of several.
LONE_VERIFIED_ROWS, SHARED_VERIFIED_ROWS = 16, 3


def predict(
    model: ModelSpec,
    recipe: Recipe,
    facts: MemoryFacts,
    *,
    held_tokens: int,
    sequences: int,
    kv_bits: int,
    chunk_tokens: int,
    draft_bytes: int = 0,
    prefix_bytes: int = 0,
    adapter_rank: int = 0,
    context: int | None = None,
    exits: Sequence[int] = (),
    state_bytes: int | None = None,
    drafts: bool = False,
    exact: bool = False,
    policy: KVEvictionPolicy | None = None,
    gpu_layers: int | None = None,
) -> Estimate:
    """Predict the memory of `model` with `sequences` states of `held_tokens` cached tokens each.

    `context` sizes rotary tables where it exceeds `held_tokens`. `state_bytes`, as an open engine reports it, replaces
    the formula for one state. `drafts` is True if proposals are verified, `exact` in exact mode. `policy`
    decides whether tokens are scored. `gpu_layers` run on a GPU, the head as one of them.
    """
    by_rows = by_rows_bytes(model, recipe, facts)
    weights = stored_weight_bytes(model, recipe, facts) - by_rows
    state = cache_bytes(model, held_tokens, kv_bits, facts) if state_bytes is None else state_bytes
    cache = state * sequences
    cached = _in_steps(held_tokens + (exact and facts.exact_scores), facts)
    # Buffers that are allocated ahead have room for one chunk of every sequence.
    chunk = min(cached * sequences if facts.fixed_buffers else held_tokens, call_tokens(model, chunk_tokens))
    fed = at_once(chunk, kv_bits, facts)
    running = activation_bytes(model, fed, sequences, facts, drafts=drafts)
    running = with_attention(model, running, chunk, cached, facts, exact=exact)
    running += reading_bytes(model, held_tokens, chunk, kv_bits, facts) + facts.running_bytes
    running += recurrent_step_bytes(model, fed, sequences, facts, drafts=drafts)
    private_weights = round(weights * facts.private_share) + exit_bytes(model, recipe, facts, exits)
    graph = facts.layer_bytes * len(model.layers)
    tokenizer, reading = facts.tokenizer(model)
    opening = max(opening_bytes(model, recipe, facts), reading - private_weights - graph - facts.library_bytes)
    estimate = Estimate(
        # Weights and rotary tables are clean pages of files; some targets copy their weights again for each exit.
        mapped_weights_bytes=round(weights * facts.mapped_share)
        + _by_position_bytes(model, recipe, facts, max(context or 0, held_tokens)),
        private_weights_bytes=private_weights,
        kv_bytes=cache,
        # The cache, drafts and prefixes reuse the memory that only opening needed.
        activation_bytes=max(running, opening - cache - draft_bytes - prefix_bytes)
        + scoring_bytes(model, policy, facts, kv_bits=kv_bits, sequences=sequences),
        runtime_bytes=facts.runtime_bytes + tokenizer + graph + deriving_bytes(kv_bits, facts),
        draft_bytes=draft_bytes,
        prefix_bytes=prefix_bytes,
        adapter_bytes=adapter_bytes(model, adapter_rank, facts.float_bits or 32, each=facts.adapted_linear_bytes)
        + (facts.deriving_bytes if adapter_rank else 0),
        disk_bytes=round((weights + by_rows) * facts.disk_share),
    )
    return divided(estimate, model, recipe, facts, gpu_layers)


def explain(plan: Plan) -> list[str]:
    """Return the arithmetic of a plan's estimate, one line per class."""
    model, facts, estimate = plan.model, plan.memory, plan.estimate
    by_rows = by_rows_bytes(model, plan.recipe, facts)
    weights = stored_weight_bytes(model, plan.recipe, facts) - by_rows
    tokens, bits = plan.storage.capacity_tokens, plan.storage.kv_bits
    arithmetic = {
        "mapped weights": _explain_mapped(plan, weights),
        "private weights": _explain_private(plan, weights),
        "cache": _explain_kv(model, tokens, bits, facts, plan.sequences),
        "activations": _explain_activations(plan),
        "runtime": _explain_runtime(plan),
        "draft": _explain_draft(plan),
        "prefixes": "prefix cache" if estimate.prefix_bytes else "no prefix cache",
        "adapters": f"one of rank {plan.adapter_rank} on every linear" if plan.adapter_rank else "no room for adapters",
        "on disk": f"{weights + by_rows:,} stored × {facts.disk_share:g}",
    }
    sizes = (*estimate.classes, ("on disk", estimate.disk_bytes))
    return [f"{name:<15} {show_bytes(size):>9} = {arithmetic[name]}" for name, size in sizes]


def _explain_draft(plan: Plan) -> str:
    if plan.drafter is not None:
        return (
            f"the head's {'' if plan.drafter.kv_layers else 'caches and '}hidden states; its weights, with rows for "
            f"{plan.drafter.draft_vocab_size:,} draft tokens, are mapped beside the model's"
        )
    return "draft model, its cache and activations" if plan.estimate.draft_bytes else "no draft model"


def _by_position_bytes(model: ModelSpec, recipe: Recipe, facts: MemoryFacts, tokens: int) -> int:
    """Return the mapped bytes that grow with the context: rotary tables and looked-up embedding rows."""
    rows = looked_up_bytes(model, recipe, facts, tokens) if model.tied else 0
    return facts.position_bytes * tokens + rows + rows_read_bytes(model, recipe, facts, tokens)


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


def activation_bytes(
    model: ModelSpec, chunk_tokens: int, sequences: int, facts: MemoryFacts, *, drafts: bool = False
) -> int:
    """Return the bytes that the largest step needs for its widest layer and its logits."""
    return _step_bytes(model, facts, *_largest_step(model, chunk_tokens, sequences, facts, drafts))


def recurrent_step_bytes(model: ModelSpec, tokens: int, sequences: int, facts: MemoryFacts, *, drafts: bool) -> int:
    """Return the extra bytes of recurrent state that a step of `tokens` allocates."""
    if checkpoint_tokens(model) is None:
        return 0
    most, least = (activation_bytes(model, each, sequences, facts, drafts=drafts) for each in (tokens, sequences))
    return step_part_bytes(model, facts.recurrent_copies, sequences, spare=most - least)


def _step_bytes(model: ModelSpec, facts: MemoryFacts, tokens: int, rows: int) -> int:
    layers, row = layers_bytes(model, tokens, facts), 0 if model.encoder else model.vocab_size * 4
    if not facts.reuses_for_logits:
        return layers + rows * row
    planned = min(rows, facts.planned_rows)
    return max(layers, residual_bytes(model, tokens, facts) + planned * row) + (rows - planned) * row


def with_attention(
    model: ModelSpec, step_bytes: int, chunk_tokens: int, cached: int, facts: MemoryFacts, *, exact: bool
) -> int:
    """Return the bytes of a step with attention's masks, and with its scores if the target stores all at once."""
    masks, scores = attention_bytes(model, chunk_tokens, cached, facts, exact=exact)
    attending = residual_bytes(model, chunk_tokens, facts) + scores if scores else 0
    return max(step_bytes, attending) + masks


def _largest_step(
    model: ModelSpec, chunk_tokens: int, sequences: int, facts: MemoryFacts, drafts: bool
) -> tuple[int, int]:
    """Return the tokens and logit rows of the largest step: prefill of a chunk, or verification for all sequences."""
    # One more row: sampling copies one row at a time.
    most, extra = verified_rows(sequences) if drafts else max(1, sequences), 1 + facts.planned_rows
    extra += most // 4 if drafts else 0  # arrays of changing sizes fragment the heap
    left = facts.verified_tokens if drafts else 0
    reading = chunk_tokens + left, extra + (most if sequences > 1 else 1)  # a lone sequence does one at a time
    returned = facts.returned_bytes is not None and layers_bytes(model, chunk_tokens, facts) >= facts.returned_bytes
    verifying = (min(chunk_tokens, most) if returned else chunk_tokens) + left, extra + most
    return max(reading, verifying, key=lambda step: _step_bytes(model, facts, *step))


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


def call_tokens(model: ModelSpec, chunk_tokens: int) -> int:
    """Return the most tokens of one call: chunks of a model with a recurrent part are cut at its checkpoints."""
    return min(chunk_tokens, checkpoint_tokens(model) or chunk_tokens)


def at_once(chunk_tokens: int, kv_bits: int, facts: MemoryFacts) -> int:
    """Return how many tokens of a chunk a layer computes at once."""
    return min(chunk_tokens, facts.half_cache_tokens or chunk_tokens) if kv_bits == 16 else chunk_tokens


def reading_bytes(model: ModelSpec, tokens: int, chunk_tokens: int, kv_bits: int, facts: MemoryFacts) -> int:
    """Return the extra bytes of a step that attends to a cache of `tokens` in 16 bits or fewer."""
    widest = max(sum(model.qkv_widths(layer)[1:]) for layer in model.layers)
    if kv_bits < 16:
        return tokens * widest * facts.widened_bits // 8
    if kv_bits > 16 or not facts.half_cache_tokens:
        return 0
    # Scores in 16 and 32 bits (6 bytes), half as much for earlier pieces; keys and values in 32 bits; and the residual
    # in and out of a part.
    piece = at_once(chunk_tokens, kv_bits, facts)
    residual = 2 * (chunk_tokens - piece) * model.hidden_size * facts.activation_bits // 8
    return (9 * model.heads * piece + 4 * widest) * tokens + residual


def _explain_kv(model: ModelSpec, tokens: int, kv_bits: int, facts: MemoryFacts, sequences: int) -> str:
    counted = Counter[tuple[int, int, int]]()
    for layer, count in storing_layers(model):
        counted[layer.kv_heads, layer.head_dim, held_tokens(layer, tokens, facts.bounds_windows)] += count
    parts = [
        f"{count} layers × 2 × {heads} heads × {dim} × {held:,} tokens" for (heads, dim, held), count in counted.items()
    ]
    scales = " + scales" if kv_bits < 16 and facts.cache_scale_bits else ""
    shared = sum(model.kv_owner(index) != index for index in range(len(model.layers)))
    scales += f"; {shared} layers share caches of others" if shared else ""
    spacing = checkpoint_tokens(model)
    if spacing is None:
        return f"{sequences} × ({' + '.join(parts)}) × {kv_bits} bit{scales}"
    shapes = recurrent_shapes(model)
    copy, recurrent = show_bytes(part_bytes(shapes)), show_bytes(recurrent_bytes(model, tokens))
    layers = sum(layer.is_recurrent for layer in model.layers)
    extra = f"{recurrent} of {layers} recurrent layers: {copy}, with a checkpoint every {spacing} tokens"
    return f"{sequences} × (({' + '.join(parts)}) × {kv_bits} bit{scales} + {extra})"


def deriving_bytes(kv_bits: int, facts: MemoryFacts) -> int:
    """Return the bytes that deriving the graphs for a cache of fewer than 32 bits takes."""
    return facts.deriving_bytes if kv_bits < 32 else 0


def _explain_runtime(plan: Plan) -> str:
    facts = plan.memory
    tokenizer = show_bytes(facts.tokenizer(plan.model)[0])
    basis = "by its file" if facts.tokenizer_bytes is not None else "by its vocabulary"
    each = f" + {len(plan.model.layers)} layers × {show_bytes(facts.layer_bytes)} of graph" if facts.layer_bytes else ""
    deriving = deriving_bytes(plan.storage.kv_bits, facts)
    each += f" + {show_bytes(deriving)} to derive graphs for this cache" if deriving else ""
    return (
        f"{show_bytes(facts.runtime_bytes)} of interpreter and vendor library + {tokenizer} of tokenizer, {basis}{each}"
    )


def _explain_activations(plan: Plan) -> str:
    opening = opening_bytes(plan.model, plan.recipe, plan.memory)
    later = plan.estimate.kv_bytes + plan.estimate.draft_bytes + plan.estimate.prefix_bytes
    reading = plan.memory.tokenizer(plan.model)[1]
    not_yet = plan.estimate.private_weights_bytes + plan.memory.layer_bytes * len(plan.model.layers)
    not_yet += plan.memory.library_bytes
    if reading - not_yet > opening and plan.estimate.activation_bytes == reading - not_yet - later:
        return (
            f"{show_bytes(reading)} to read the tokenizer, less library, graph, copied weights and cache, not there yet"
        )
    if opening and plan.estimate.activation_bytes == opening - later:
        return f"{show_bytes(opening)} to open the largest tensor, less the cache, which does not exist yet"
    held, kv_bits = plan.storage.capacity_tokens, plan.storage.kv_bits
    chunk = call_tokens(plan.model, plan.chunk_tokens)
    cache = reading_bytes(plan.model, held, chunk, kv_bits, plan.memory)
    once = f" + {show_bytes(cache)} to read the {kv_bits}-bit cache" if cache else ""
    once += f" + {show_bytes(plan.memory.running_bytes)} for the first step" if plan.memory.running_bytes else ""
    width, bits = activation_width(plan.model, plan.memory), plan.memory.activation_bits
    drafts, fed = plan.estimate.draft_bytes > 0, at_once(chunk, kv_bits, plan.memory)
    tokens, rows = _largest_step(plan.model, fed, plan.sequences, plan.memory, drafts)
    masks, exact_more = _explained_attention(plan, drafts)
    scoring = scoring_bytes(plan.model, plan.cache, plan.memory, kv_bits=kv_bits, sequences=plan.sequences)
    parts = recurrent_step_bytes(plan.model, fed, plan.sequences, plan.memory, drafts=drafts)
    others = ((masks, "of attention's masks"), (scoring, "to score tokens"), (parts, "of recurrent parts in a step"))
    once += "".join(f" + {show_bytes(size)} {what}" for size, what in others if size)
    once += f"; exact mode takes {show_bytes(exact_more)} more" if exact_more else ""
    return (
        f"{tokens:,} tokens × {width:,.0f} wide × {bits} bit"
        f" + {rows} × {plan.model.vocab_size:,} logits × 4 bytes{once}"
    )


def _explained_attention(plan: Plan, drafts: bool) -> tuple[int, int]:
    """Return the bytes of attention's masks, and the extra bytes of exact mode in the step and the caches."""
    model, facts, held = plan.model, plan.memory, plan.storage.capacity_tokens
    chunk = call_tokens(model, plan.chunk_tokens)
    step = activation_bytes(model, chunk, plan.sequences, facts, drafts=drafts)
    fast, exact = _in_steps(held, facts), _in_steps(held + facts.exact_scores, facts)
    masks, _ = attention_bytes(model, chunk, fast, facts, exact=False)
    taken = with_attention(model, step, chunk, exact, facts, exact=True)
    taken -= with_attention(model, step, chunk, fast, facts, exact=False)
    bits = plan.storage.kv_bits
    caches = cache_bytes(model, exact, bits, facts) - cache_bytes(model, fast, bits, facts)
    return masks, taken + caches * plan.sequences if facts.exact_scores else 0


def _explain_mapped(plan: Plan, weights: int) -> str:
    tokens = max(plan.context, plan.storage.capacity_tokens)
    tables = plan.memory.position_bytes * tokens
    rows = _by_position_bytes(plan.model, plan.recipe, plan.memory, tokens) - tables
    extra = f" + {tokens:,} positions × {plan.memory.position_bytes} bytes" if tables else ""
    own = rows_read_bytes(plan.model, plan.recipe, plan.memory, tokens)
    extra += f" + {show_bytes(rows - own)} of rows that tokens look up" if rows > own else ""
    if own:
        whole = show_bytes(by_rows_bytes(plan.model, plan.recipe, plan.memory))
        extra += f" + {show_bytes(own)} of rows of the per-layer embeddings, whose {whole} stay in the file"
    return f"{weights:,} stored × {plan.memory.mapped_share:g} mapped{extra}"


def _explain_private(plan: Plan, weights: int) -> str:
    again = exit_bytes(plan.model, plan.recipe, plan.memory, plan.exits)
    extra = f" + {show_bytes(again)} again for exits" if again else ""
    return f"{weights:,} stored × {plan.memory.private_share:g} copied{extra}"
